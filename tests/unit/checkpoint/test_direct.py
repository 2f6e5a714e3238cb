import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import PAGE, allocate, digest
from hvdrecover.checkpoint.storage.local import PIECE, LocalStorage
from hvdrecover.errors import StorageError

SIZES = [
    *(0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 5),
    *(PIECE - 1, PIECE, PIECE + 1, PIECE + PAGE, 3 * PIECE + 2 * PAGE + 7),
]


def write(path, data):
    return LocalStorage(path.parent).write(path.name, data)


def read(path, into):
    return LocalStorage(path.parent).read_into(path.name, into)


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
    assert read(path, back) == (size, digest(data))
    assert np.array_equal(back, data)


def open_files():
    return list(Path("/proc/self/fd").iterdir())


class Calls:
    """The calls of `os`, as (call, past the page cache, bytes, start), and the errors they shall give."""

    def __init__(self, monkeypatch):
        self.made = []
        self.fail = {}
        self.at_most = None
        self._direct = set()
        self._lock = threading.Lock()
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
        with self._lock:
            self.made.append((name, past, len(data), start))
        if past and name in self.fail:
            raise OSError(self.fail[name], os.strerror(self.fail[name]))
        if self.at_most is not None:
            data = data[: self.at_most]
        return self._os[name](fd, data if name == "pwrite" else [data], start)

    def past(self, name):
        return [size for call, past, size, _ in self.made if call == name and past]


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
        assert sum(size for call, past, size, _ in calls.made if call == name and not past) == size % PAGE
        assert max(calls.past(name), default=0) <= PIECE


@pytest.mark.parametrize("call", ["open", "pwrite"])
@pytest.mark.parametrize("size", [PAGE, 4 * PIECE])
def test_any_other_error_is_raised_and_no_descriptor_is_left(tmp_path, calls, call, size):
    calls.fail = {call: errno.EIO}
    before = len(open_files())
    with pytest.raises(StorageError, match="Input/output error"):
        write(tmp_path / "file", content(size))
    assert len(open_files()) == before


@pytest.mark.parametrize("at_most", [1000, PAGE, 3 * PAGE, 3 * PAGE + 512])
def test_a_file_system_that_transfers_less_than_it_is_asked_to_is_asked_again(tmp_path, calls, at_most):
    calls.at_most = at_most
    calls.fail = {"open": errno.EINVAL} if at_most % PAGE else {}
    check_there_and_back(tmp_path / "file", 20 * PAGE + 1)
