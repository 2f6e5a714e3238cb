"""The mounts that a checkpoint root may be in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.mounted import Mount, described, mount_of
from hvdrecover.checkpoint.storage.unfit import refuse
from hvdrecover.doctor.storage import Trial
from hvdrecover.errors import ConfigError
from tests.unit.checkpoint.roots import make_store

MOUNTINFO = """\
22 27 0:20 / /proc rw,nosuid - proc proc rw
27 1 254:1 / / rw,noatime shared:1 - ext4 /dev/vda1 rw,discard
90 27 0:50 / /mnt/one rw,nosuid,nodev shared:7 master:2 - fuse.sshfs user@host:/data rw,user_id=0
91 27 0:51 / /mnt/two rw - fuse mountpoint-s3 rw,user_id=0
92 27 0:52 / /mnt/three rw - tmpfs  rw
""".splitlines()


@pytest.mark.parametrize(
    ("mount", "named"),
    [
        (Mount("fuse.sshfs", "user@host:/data"), "sftp://"),
        (Mount("fuse.s3fs", "s3fs"), "s3://"),
        (Mount("fuse", "s3fs#bucket"), "s3://"),
        (Mount("fuse.ossfs", "ossfs"), "s3://"),
        (Mount("fuse.cosfs", "cosfs"), "s3://"),
        (Mount("fuse.goofys", "bucket"), "s3://"),
        (Mount("fuse", "mountpoint-s3"), "s3://"),
        (Mount("fuse.mountpoint-s3", "mountpoint-s3"), "s3://"),
        (Mount("fuse.gcsfuse", "bucket"), "gs://"),
        (Mount("fuse", "blobfuse2"), "az://"),
        (Mount("fuse.blobfuse", "blobfuse"), "az://"),
        (Mount("fuse.rclone", "remote:bucket"), "s3://"),
    ],
)
def test_a_mount_that_shows_a_store_as_a_folder_is_refused_with_its_name_and_the_stores_url(
    mount: Mount, named: str
) -> None:
    program = mount.kind.partition(".")[2] or mount.source.partition("#")[0]
    with pytest.raises(ConfigError, match=f"^file:///root: {program} .* {named}") as caught:
        refuse(mount, "file:///root")
    assert caught.value.name == "file:///root"


@pytest.mark.parametrize(
    "mount",
    [
        Mount("", ""),
        Mount("ext4", "/dev/vda1"),
        Mount("ext4", "s3fs"),  # what is mounted counts for FUSE only
        Mount("nfs4", "host:/data"),
        Mount("fuse.mfs", "mfs#host:9421"),
        Mount("fuse.glusterfs", "host:/volume"),
        Mount("fuse.juicefs", "JuiceFS:one"),
        Mount("fuse", "bucket"),
        Mount("fuseblk", "/dev/sdb1"),
    ],
)
def test_other_file_systems_are_not(mount: Mount) -> None:
    refuse(mount, "file:///root")


@pytest.mark.parametrize(
    ("number", "mount"),
    [
        ("254:1", Mount("ext4", "/dev/vda1")),
        ("0:50", Mount("fuse.sshfs", "user@host:/data")),
        ("0:51", Mount("fuse", "mountpoint-s3")),
        ("0:52", Mount("tmpfs", "")),
        ("0:99", Mount("", "")),
    ],
)
def test_what_the_kernel_says_of_a_mount(number: str, mount: Mount) -> None:
    assert described(MOUNTINFO, number) == mount


def test_a_root_in_such_a_mount_is_refused_at_the_start_and_by_the_doctor_and_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mount_of(tmp_path).kind  # of this very machine
    url = f"file://{tmp_path}/root"
    make_store(open_storage(url)).claim_next()
    looked: list[Path] = []

    def mounted(folder: Path) -> Mount:
        looked.append(folder)
        return Mount("fuse.gcsfuse", "bucket")

    monkeypatch.setattr("hvdrecover.checkpoint.storage.local.mount_of", mounted)
    for start in (lambda: make_store(open_storage(url)).claim_next(), lambda: Trial(url)):
        with pytest.raises(ConfigError, match=r"gcsfuse .*gs://") as caught:
            start()
        assert caught.value.name == url
    assert set(looked) == {tmp_path / "root"}
    assert open_storage(url).names("claims") == ["g0001.json"]
