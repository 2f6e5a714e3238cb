"""Opening storages, and the local one. tests/contracts has the contract that every storage holds."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest

from hvdrecover.checkpoint import redact
from hvdrecover.checkpoint.arena import PAGE, allocate, digest
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.storage.local import PIECE, UNSUPPORTED_MOUNTS, LocalStorage, fuse_program
from hvdrecover.checkpoint.storage.remote import RemoteStorage
from hvdrecover.doctor import host as doctor
from hvdrecover.errors import ConfigError, StorageError
from tests.unit.checkpoint.roots import make_store

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
    calls = dict.fromkeys(("names", "size", "read", "remove", "delete"), ("x",))
    calls |= dict.fromkeys(("publish", "create"), ("x", b"1"))
    calls |= {call: ("x", np.zeros(1, dtype=np.uint8)) for call in ("read_into", "write")}
    for call, arguments in calls.items():
        with pytest.raises(StorageError, match="is away") as caught:
            getattr(storage, call)(*arguments)
        assert "secret" not in str(caught.value)
        assert caught.value.url.startswith("broken://host/run")


@pytest.mark.parametrize(
    ("error", "refusal", "match"),
    [
        (ConnectionError, StorageError, r"^ftp://host/run: .*: no route to ftp://host\."),
        (PermissionError, StorageError, r"^ftp://host/run: .*: no route to ftp://host\."),
        (ImportError, ConfigError, "'ftp://host/run' .*: no route to"),  # such as a missing package
    ],
)
def test_a_storage_that_cannot_be_opened_is_an_error_without_credentials(monkeypatch, error, refusal, match):
    def connect(url, **options):
        raise error("no route to ftp://user:secret@host")

    monkeypatch.setattr(fsspec.core, "url_to_fs", connect)
    with pytest.raises(refusal, match=match) as caught:
        open_storage("ftp://user:secret@host/run")
    assert "secret" not in str(caught.value)


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


# -- past the page cache ---------------------------------------------------------------------------------


SIZES = [
    *(0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5),
    *(PIECE - 1, PIECE, PIECE + 1, PIECE + PAGE, 3 * PIECE + 2 * PAGE + 7),
]


def write(path, data):
    return LocalStorage(path.parent).write(path.name, data)


def content(size, *, aligned=True):
    """Bytes that differ from page to page and from piece to piece."""
    found = allocate(size + 1)[:size] if aligned else allocate(size + 1)[1:]
    found[:] = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    return found


def check_there_and_back(path, size, *, aligned=True):
    data = content(size, aligned=aligned)
    assert write(path, data) == digest(data)
    assert path.read_bytes() == data.tobytes()
    back = allocate(size + 1)[:size] if aligned else allocate(size + 1)[1:]
    assert LocalStorage(path.parent).read_into(path.name, back) == (size, digest(data))
    assert np.array_equal(back, data)


class Calls:
    """The calls of `os`, as (call, past the page cache, bytes), and the errors they shall give."""

    def __init__(self, monkeypatch):
        self.made = []
        self.fail = {}
        self.at_most = None
        self._direct = set()
        self._os = {name: getattr(os, name) for name in ("open", "pwrite", "preadv")}
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "pwrite", lambda fd, data, at: self._transfer("pwrite", fd, data, at))
        monkeypatch.setattr(os, "preadv", lambda fd, data, at: self._transfer("preadv", fd, data[0], at))

    def open(self, path, flags, mode=0o777, **others):
        if flags & os.O_DIRECT and "open" in self.fail:
            raise OSError(self.fail["open"], os.strerror(self.fail["open"]))
        found = self._os["open"](path, flags, mode, **others)
        (self._direct.add if flags & os.O_DIRECT else self._direct.discard)(found)
        return found

    def _transfer(self, name, fd, data, start):
        past = fd in self._direct
        self.made.append((name, past, len(data)))
        if past and name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))
        if self.at_most is not None:
            data = data[: self.at_most]
        return self._os[name](fd, data if name == "pwrite" else [data], start)

    def past(self, name):
        return [size for call, past, size in self.made if call == name and past]


@pytest.fixture
def calls(monkeypatch):
    return Calls(monkeypatch)


@pytest.fixture
def takes_o_direct(tmp_path):
    """Skips where temporary files lie on a file system that does not."""
    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary folder refuses O_DIRECT")


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_written_is_read_back_with_its_digest(tmp_path, size, aligned):
    check_there_and_back(tmp_path / "file", size, aligned=aligned)


@pytest.mark.parametrize("size", SIZES)
def test_whole_pages_go_past_the_page_cache_and_only_the_rest_through_it(
    tmp_path, calls, takes_o_direct, size
):
    check_there_and_back(tmp_path / "file", size)
    for name in ("pwrite", "preadv"):
        assert sum(calls.past(name)) == size // PAGE * PAGE
        assert sum(size for call, past, size in calls.made if call == name and not past) == size % PAGE
        assert max(calls.past(name), default=0) <= PIECE


@pytest.mark.parametrize("call", ["open", "pwrite"])
@pytest.mark.parametrize("size", [PAGE, 4 * PIECE])
def test_any_other_error_is_raised_and_no_descriptor_is_left(tmp_path, calls, call, size):
    calls.fail = {call: errno.EIO}
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(StorageError, match="Input/output error"):
        write(tmp_path / "file", content(size))
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("at_most", [1000, PAGE, 3 * PAGE, 3 * PAGE + 512])
def test_a_file_system_that_transfers_less_than_it_is_asked_to_is_asked_again(tmp_path, calls, at_most):
    calls.at_most = at_most
    calls.fail = {"open": errno.EINVAL} if at_most % PAGE else {}
    check_there_and_back(tmp_path / "file", 20 * PAGE + 1)
