import errno
import os
import subprocess
import sys

import fsspec
import numpy as np
import pytest

from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.local import UNSUPPORTED_MOUNTS, LocalStorage, fuse_program
from hvdrecover.checkpoint.storage.remote import RemoteStorage
from hvdrecover.doctor import host as doctor
from hvdrecover.errors import ConfigError, StorageError
from hvdrecover.redaction import redact
from tests.unit.checkpoint.roots import make_store


def buffer(data):
    return np.frombuffer(data, dtype=np.uint8)


# -- URLs ----------------------------------------------------------------------------------------------


def test_a_path_and_a_file_url_are_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    urls = {
        open_storage(url).url for url in (str(tmp_path / "r"), f"file://{tmp_path}/r", f"{tmp_path}/r/", "r")
    }
    assert urls == {f"file://{tmp_path}/r"}
    assert isinstance(open_storage("r"), LocalStorage)
    assert list(tmp_path.iterdir()) == []


def test_a_local_path_may_contain_two_colons(tmp_path):
    for url in (f"{tmp_path}/lr::0.1", f"file://{tmp_path}/lr::0.2"):
        open_storage(url).publish("f", b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lr::0.1", "lr::0.2"]


def test_an_unknown_protocol_is_a_config_error():
    with pytest.raises(ConfigError, match="'carrierpigeon://loft/run'") as caught:
        open_storage("carrierpigeon://loft/run")
    assert caught.value.name == "checkpoint"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://bucket/run@v2/x", "s3://bucket/run@v2/x"),
        ("sftp://user@host/run", "sftp://host/run"),
        ("sftp://user:secret@host:22/run", "sftp://host:22/run"),
        ("sftp://user:se@cret@host/run", "sftp://host/run"),
        ("s3://KEY:secret/with/slashes@bucket/run", "s3://bucket/run"),
        ("sftp://host:22/run@v2", "sftp://host:22/run@v2"),
        ("https://host/run?sig=secret&x=1", "https://host/run"),
        ("simplecache::s3://KEY:secret@bucket/run", "simplecache::s3://bucket/run"),
        ("could not reach sftp://user:secret@host/run: refused", "could not reach sftp://host/run: refused"),
        ("/data/user@host/run", "/data/user@host/run"),
    ],
)
def test_credentials_are_taken_out(url, shown):
    assert redact(url) == shown


class Broken:
    """A remote file system that is away, and says what it was asked with."""

    protocol = "broken"

    def __getattr__(self, name):
        def fail(*args, **kwargs):
            raise ConnectionError("broken://user:secret@host is away")

        return fail


def test_every_failure_of_a_file_system_is_a_storage_error_without_credentials():
    storage = RemoteStorage(Broken(), "/run", "broken://host/run")
    calls = [
        lambda: storage.names(),
        lambda: storage.size("x"),
        lambda: storage.read("x"),
        lambda: storage.read_into("x", np.zeros(1, dtype=np.uint8)),
        lambda: storage.write("x", buffer(b"1")),
        lambda: storage.publish("x", b"1"),
        lambda: storage.create("x", b"1"),
        lambda: storage.remove("x"),
        lambda: storage.delete("x"),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="is away") as caught:
            call()
        assert "secret" not in str(caught.value)
        assert caught.value.url.startswith("broken://host/run")


@pytest.mark.parametrize("error", [ConnectionError, RuntimeError, PermissionError])
def test_a_server_that_cannot_be_reached_is_a_storage_error(monkeypatch, error):
    def connect(url, **options):
        raise error("no route to ftp://user:secret@host")

    monkeypatch.setattr(fsspec.core, "url_to_fs", connect)
    with pytest.raises(StorageError, match=r"^ftp://host/run: .*: no route to ftp://host\.") as caught:
        open_storage("ftp://user:secret@host/run")
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_a_config_error_without_credentials(monkeypatch):
    def connect(url, **options):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", connect)
    with pytest.raises(ConfigError, match=r"'s3://bucket/run' .*: Install s3fs"):
        open_storage("s3://KEY:secret@bucket/run")


# -- the local file system -----------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path):
    return LocalStorage(tmp_path)


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def no_space(*args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("action", ["publish", "create"])
def test_a_full_disk_leaves_the_old_file_and_nothing_temporary(local, tmp_path, monkeypatch, action):
    local.publish("a/1", b"old")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StorageError, match=r"No space left on device"):
        getattr(local, action)("a/1", b"new")
    assert files_below(tmp_path) == ["a/1"]
    assert local.read("a/1") == b"old"


def test_what_a_killed_process_left_is_neither_listed_nor_in_the_way(local, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        # Killed in the middle of a publish: no clean-up runs.
        patched.setattr(type(tmp_path), "unlink", lambda self, missing_ok=False: None)
        patched.setattr(os, "replace", no_space)
        with pytest.raises(StorageError):
            local.publish("claims/g0001.json", b"half")
    assert len(files_below(tmp_path)) == 1
    assert local.names("claims") == []
    assert local.create("claims/g0001.json", b"whole") is True
    assert (local.names("claims"), local.read("claims/g0001.json")) == (["g0001.json"], b"whole")
    local.delete("claims")
    assert files_below(tmp_path) == []


# -- mounts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "source", "program"),
    [
        ("fuse.sshfs", "user@host:/data", "sshfs"),
        ("fuse", "s3fs#bucket", "s3fs"),
        ("fuse", "mountpoint-s3", "mountpoint-s3"),
        ("ext4", "s3fs", ""),  # the source counts for FUSE only
        ("fuseblk", "/dev/sdb1", ""),
    ],
)
def test_the_program_of_a_fuse_mount_is_known_by_its_type_or_its_source(kind, source, program):
    assert fuse_program(source, kind) == program
    assert not program or program in UNSUPPORTED_MOUNTS


def test_a_root_in_an_unsupported_mount_is_refused_at_the_start_and_by_the_doctor_and_can_be_read(
    tmp_path, monkeypatch
):
    url = f"file://{tmp_path}/root"
    make_store(open_storage(url)).claim_next()
    monkeypatch.setattr(
        "hvdrecover.checkpoint.storage.local.mount_of", lambda folder: ("bucket", "fuse.gcsfuse")
    )
    for start in (lambda: make_store(open_storage(url)).claim_next(), lambda: doctor.root(url)):
        with pytest.raises(ConfigError, match=r"gcsfuse .*gs://") as caught:
            start()
        assert caught.value.name == url
    assert open_storage(url).names("claims") == ["g0001.json"]


# -- threads -------------------------------------------------------------------------------------------

HANGING = """
import threading
import numpy as np
from hvdrecover.checkpoint.storage import transferred

begun = threading.Semaphore(0)

def hang(piece, at):
    begun.release()
    threading.Event().wait()

def run(pieces):
    for _ in pieces:
        pass

pieces = transferred(np.zeros(400, np.uint8), 100, 2, hang)
threading.Thread(target=run, args=(pieces,), daemon=True).start()
for _ in range(2):
    begun.acquire()
print("the program ends")
"""


def test_transfers_that_hang_do_not_keep_a_process_from_exiting():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("the program ends\n", "", 0)
