"""The mounts that a checkpoint root may be in."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.local import QUIRKS, Mount, mount_of, parse_mounts
from hvdrecover.doctor import host
from hvdrecover.errors import ConfigError
from tests.unit.checkpoint.roots import make_store

MOUNTINFO = """\
22 27 0:20 / /proc rw,nosuid - proc proc rw
27 1 254:1 / / rw,noatime shared:1 - ext4 /dev/vda1 rw,discard
90 27 0:50 / /mnt/one rw,nosuid,nodev shared:7 master:2 - fuse.sshfs user@host:/data rw,user_id=0
91 27 0:51 / /mnt/two rw - fuse mountpoint-s3 rw,user_id=0
92 27 0:52 / /mnt/three rw - tmpfs  rw
"""


@pytest.mark.parametrize(
    ("mount", "program"),
    [
        (Mount("fuse.sshfs", "user@host:/data"), "sshfs"),
        (Mount("fuse", "s3fs#bucket"), "s3fs"),
        (Mount("fuse", "mountpoint-s3"), "mountpoint-s3"),
        (Mount("ext4", "s3fs"), ""),  # the source counts for FUSE only
        (Mount("nfs4", "host:/data"), ""),
        (Mount("fuseblk", "/dev/sdb1"), ""),
    ],
)
def test_the_program_of_a_fuse_mount_is_known_by_its_type_or_its_source(mount: Mount, program: str) -> None:
    assert mount.program == program
    assert not program or program in QUIRKS


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
    assert parse_mounts(MOUNTINFO, number) == mount


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
    for start in (lambda: make_store(open_storage(url)).claim_next(), lambda: host.root(url)):
        with pytest.raises(ConfigError, match=r"gcsfuse .*gs://") as caught:
            start()
        assert caught.value.name == url
    assert set(looked) == {tmp_path / "root"}
    assert open_storage(url).names("claims") == ["g0001.json"]
