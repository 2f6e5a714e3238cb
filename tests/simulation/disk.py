"""A checkpoint root in memory: slow, failing or full at times, and torn where a process dies in a write."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.storage import TEMPORARY, Storage, Temporary
from tests.simulation.scheduler import Scheduler

if TYPE_CHECKING:
    from tests.simulation.invariants import Invariants

URL = "simulated://root"
_USUAL = 0.02  # seconds that an operation takes, on average


class Disk:
    """The files of a checkpoint root."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.files: dict[str, bytes] = {}  # path to content
        # Folder and size of files that are being written, or were when their process died.
        self.temporaries: dict[str, tuple[str, int]] = {}
        self.capacity = float("inf")  # bytes; infinite if nothing can fill it
        self.fails_until = -1.0  # until when each operation fails
        self.slow_until = -1.0  # until when each operation takes a hundred times as long
        self.lost_answers = 0  # how many of the next changes are made, and reported as failed
        # The files while the file system is not mounted, and processes see an empty folder.
        self.unmounted: dict[str, bytes] | None = None
        self.watch: Invariants  # told of each operation and of each change
        self.at_operation: Callable[[str, str], None] = lambda kind, path: None

    @property
    def used(self) -> int:
        return sum(map(len, self.files.values())) + sum(size for _, size in self.temporaries.values())

    @property
    def kept(self) -> dict[str, bytes]:
        """The files, whether or not they can be seen at present."""
        return self.files if self.unmounted is None else self.unmounted

    def unmount(self) -> None:
        if self.unmounted is None:
            self.unmounted, self.files = self.files, {}

    def mount(self) -> None:
        if self.unmounted is not None:
            self.files, self.unmounted = self.unmounted, None

    def require(self, nbytes: int) -> None:
        """Raise an error if so many more bytes do not fit."""
        if self.used + nbytes > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")

    def operate(self, kind: str, path: str) -> None:
        """Take time for an operation; fail in an outage."""
        scheduler, mounted = self.scheduler, self.unmounted is None
        self.at_operation(kind, path)
        slowness = 100 if scheduler.now < self.slow_until else 1
        scheduler.sleep(scheduler.dice.random() * 2 * _USUAL * slowness)
        if scheduler.now < self.fails_until:
            raise OSError(errno.EIO, "simulated outage")
        if mounted != (self.unmounted is None):
            raise OSError(errno.ESTALE, "simulated: the root was unmounted or mounted meanwhile")

    def put(self, path: str, data: bytes) -> None:
        self.scheduler.check()
        self.require(len(data) - len(self.files.get(path, b"")))
        self.files[path] = data
        self.watch.disk_changed("put", path)

    def drop(self, path: str) -> None:
        self.scheduler.check()
        if path not in self.files:
            raise FileNotFoundError(path)
        del self.files[path]
        self.watch.disk_changed("drop", path)

    def answer(self) -> None:
        """Lose the answer to a change that was made."""
        if self.lost_answers:
            self.lost_answers -= 1
            raise OSError(errno.ETIMEDOUT, "simulated: the answer was lost")


class SimulatedStorage(Storage):
    """One process's access to a `Disk`."""

    def __init__(self, disk: Disk, url: str = URL) -> None:
        self._disk = disk
        self.url = url

    def _names(self, folder: str) -> Iterable[str]:
        self._disk.operate("list", folder)
        prefix = f"{folder}/" if folder else ""
        self._disk.watch.listed(folder)
        below = (path.removeprefix(prefix) for path in self._disk.files if path.startswith(prefix))
        return {path.split("/")[0]: None for path in below}

    def _size(self, path: str) -> int | None:
        self._disk.operate("size", path)
        found = self._disk.files.get(path)
        return None if found is None else len(found)

    def _read(self, path: str) -> bytes:
        self._disk.operate("read", path)
        if path not in self._disk.files:
            raise FileNotFoundError(path)
        return self._disk.files[path]

    def _read_pieces(self, path: str, buffer: Bytes, start: int) -> Iterator[tuple[Bytes, int]]:
        half = (len(buffer) + 1) // 2
        for begin, piece in ((0, buffer[:half]), (half, buffer[half:])):
            data = self._read(path)[start + begin : start + begin + len(piece)]
            memoryview(piece)[: len(data)] = data
            yield piece, len(data)

    def _write_pieces(self, path: str, buffer: Bytes) -> Iterator[Bytes]:
        half = (len(buffer) + 1) // 2
        self._disk.put(path, b"")
        for piece, content in ((buffer[:half], buffer[:half]), (buffer[half:], buffer)):
            self._disk.operate("write", path)
            self._disk.put(path, content.tobytes())
            yield piece
        self._disk.answer()

    def _publish(self, path: str, data: bytes, *, exclusive: bool) -> bool:
        self._temporarily(path, data)
        if exclusive and path in self._disk.files:
            return False
        self._disk.put(path, data)
        self._disk.answer()
        return True

    def _remove(self, path: str) -> None:
        self._disk.operate("remove", path)
        self._disk.drop(path)
        self._disk.answer()

    def _delete(self, folder: str) -> None:
        found = [path for path in self._disk.files if path.startswith(f"{folder}/")]
        for path in found:
            self._disk.operate("delete", path)
            if path in self._disk.files:
                self._disk.drop(path)
        self._disk.answer()

    def _temporaries(self) -> list[Temporary]:
        self._disk.operate("temporaries", "")
        return [
            Temporary(path, folder, nbytes, path) for path, (folder, nbytes) in self._disk.temporaries.items()
        ]

    def _discard(self, temporary: Temporary) -> None:
        self._disk.operate("discard", temporary.path)
        self._disk.scheduler.check()
        if self._disk.temporaries.pop(temporary.path, None) is None:
            raise FileNotFoundError(temporary.path)

    def _temporarily(self, path: str, data: bytes) -> None:
        """Write to a hidden file, which stays if the process dies now."""
        disk, folder = self._disk, path.rpartition("/")[0]
        disk.require(len(data))
        hidden = f"{folder}/{TEMPORARY}{disk.scheduler.dice.getrandbits(48):012x}"
        disk.temporaries[hidden] = folder, len(data)
        try:
            disk.operate("publish", path)
        except OSError:
            disk.temporaries.pop(hidden, None)
            raise
        disk.scheduler.check()
        disk.temporaries.pop(hidden, None)
