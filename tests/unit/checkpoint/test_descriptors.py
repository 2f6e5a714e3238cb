"""A child that is forked while files are written or read, as a data loader's are, has none of them open."""

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.storage import LocalStorage

TIMEOUT = 30  # seconds; never reached unless something is broken
FILE = "g0001-c00000001/model.safetensors"


class Stop:
    """A system call about a file below a folder that a thread is stopped in, the first time."""

    def __init__(self, monkeypatch, call, root, *, made):
        self.reached, self.go = threading.Event(), threading.Event()
        self._call, self._root, self._made = getattr(os, call), str(root), made
        monkeypatch.setattr(os, call, self)

    def __call__(self, file, *args, **named):
        is_it = threading.current_thread().name != "MainThread" and not self.reached.is_set()
        is_it = is_it and self._path(file).startswith(f"{self._root}/g")
        if is_it and not self._made:
            self._wait()
        result = self._call(file, *args, **named)
        if is_it and self._made:
            self._wait()
        return result

    def _path(self, file):
        return str(Path(f"/proc/self/fd/{file}").readlink()) if isinstance(file, int) else str(file)

    def _wait(self):
        self.reached.set()
        assert self.go.wait(TIMEOUT)


def files_of_a_child(root):
    """The files below a folder that a child has open which is forked now, without an exec."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        links = []
        for link in list(Path("/proc/self/fd").iterdir()):
            with suppress(OSError):
                links.append(str(link.readlink()))
        os.write(writer, "\n".join(link for link in links if link.startswith(str(root))).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as found:
        links = found.read().split("\n")
    os.waitpid(child, 0)
    return [link for link in links if link]


def data():
    found = allocate(1 << 16)
    found[:] = np.arange(1 << 16, dtype=np.uint32).astype(np.uint8)
    return found


def writes(storage, root):
    storage.write(FILE, data())


def reads(storage, root):
    storage.read_into(FILE, data())


def publishes(storage, root):
    storage.publish(f"{FILE}.json", b"{}")


@pytest.mark.parametrize(
    ("does", "call", "made"),
    [
        (writes, "pwrite", False),
        (writes, "fsync", False),
        (reads, "preadv", False),
        (publishes, "fsync", True),
    ],
)
def test_a_fork_during_a_transfer_inherits_nothing(tmp_path, monkeypatch, does, call, made):
    storage = LocalStorage(tmp_path)
    storage.write(FILE, data())
    stop = Stop(monkeypatch, call, tmp_path, made=made)
    thread = threading.Thread(target=does, args=(storage, tmp_path))
    thread.start()
    assert stop.reached.wait(TIMEOUT)
    of_this_process = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    assert any(path.startswith(str(tmp_path)) for path in of_this_process)
    found = files_of_a_child(tmp_path)
    found_again = files_of_a_child(tmp_path)
    stop.go.set()
    thread.join(TIMEOUT)
    assert (found, found_again) == ([], [])
    assert (tmp_path / FILE).read_bytes() == data().tobytes()  # what happened here was not disturbed
