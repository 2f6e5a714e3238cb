"""The near tier: commits in a host's own memory, which outlive the processes that made them.

The memory that a commit is copied into *is* a folder of files at the near root, which is laid out as every
checkpoint root (`hvdrecover.checkpoint.near_root`):

1. `NearTier.acquire` hides a folder: its manifest is deleted, and its name is no commit's.
2. The training thread copies the next commit into the mapped files.
3. `NearTier.seal` has the tier's thread compute digests, publish the manifest, and rename the folder to the
   commit's name.

So a process that is killed at any point leaves whole commits and hidden folders, never a torn commit. If the
next commit needs the memory before it is sealed, it is not sealed; the older one stays the newest that is.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import near_root
from hvdrecover.checkpoint.arena import HUGE_PAGE, Arena, Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest, digest
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import TENSORS, FileEntry
from hvdrecover.checkpoint.near_root import BUFFERS, Keeper
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import ReadBytes, Storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.writer import step_back
from hvdrecover.clock import Clock

BUFFER = f"{TEMPORARY}buffer-"
_NICENESS = 5  # niceness of the tier's thread: training comes first, but sealing keeps up with commits
_HEAD_START = 0.005  # seconds for the ranks to end the commit before sealing takes CPU time
_PIECE = 1 << 22  # bytes to digest before checking whether the next commit has taken the buffer

Layouts = Mapping[str, Layout]
Decided = Callable[[str | None, int], None]
"""Called with the reason why the tier is off, or None if it is on, and the bytes of a commit."""


def mapped(storage: Storage, path: str, size: int) -> tuple[Bytes, ReadBytes]:
    """Map a file of the near root without a copy, and compute its digest. Only for the keeper."""
    memory = _open_existing(Path(storage.url.removeprefix("file://")) / path)
    return memory, ReadBytes(len(memory), digest(memory))


class Buffer:
    """Memory for one commit: a folder with a mapped file for each attribute that holds tensors.

    Attributes:
        arenas: the mapped files, by attribute name; files that an earlier process left are not mapped yet.
        commit: the sealed commit that it holds, or None.
        snapshot: the commit that this process has copied into it, or None.
    """

    def __init__(self, path: Path, arenas: Mapping[str, Arena] | None = None) -> None:
        self._path = path
        self.arenas: dict[str, Arena] = dict(arenas or {})
        self.commit = CommitId.parse(path.name) if (path / manifests.FILE_NAME).exists() else None
        self.snapshot: Snapshot | None = None

    @property
    def layouts(self) -> Layouts:
        """The layouts of the mapped files, by attribute name."""
        return {name: arena.layout for name, arena in self.arenas.items()}

    def open(self) -> None:
        """Unseal the commit in the buffer before its memory is overwritten."""
        self.snapshot = None
        if self.commit is not None:
            self.commit = None
            with suppress(FileNotFoundError):  # the folder was deleted, but the mapped memory still exists
                (self._path / manifests.FILE_NAME).unlink(missing_ok=True)
                self._rename(f"{BUFFER}{uuid.uuid4().hex}")

    def lacks(self, layouts: Layouts) -> bool:
        """Return whether `fit` would create a file."""
        return self.layouts != layouts and any(
            _size(self._file(name)) != layout.nbytes for name, layout in layouts.items()
        )

    def fit(self, layouts: Layouts) -> None:
        """Create the files that a commit of these layouts needs, and delete all others.

        Raises:
            OSError: the file system or the memory is full.
        """
        self._path.mkdir(mode=0o700, exist_ok=True)
        self.arenas = {name: each for name, each in self.arenas.items() if each.layout == layouts.get(name)}
        kept = {file for name, layout in layouts.items() if _size(file := self._file(name)) == layout.nbytes}
        for file in set(self._path.iterdir()) - kept:
            file.unlink()
        for name, layout in layouts.items():
            if name not in self.arenas:
                file = self._file(name)
                memory = _open_existing(file) if file in kept else _create(file, layout.nbytes)
                self.arenas[name] = Arena(layout, memory, shared=True)
                self.arenas[name].take_back()  # writes the header

    def seal(self, commit: CommitId, manifest: bytes) -> None:
        """Publish the buffer as a commit that other processes can read.

        Raises:
            OSError: the manifest cannot be written.
        """
        temporary = self._path / f"{TEMPORARY}manifest"
        temporary.write_bytes(manifest)
        temporary.replace(self._path / manifests.FILE_NAME)
        self._rename(commit.name)
        self.commit = commit

    def delete(self) -> None:
        """Delete its files. A holder of its arenas keeps their memory."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._path / f"{name}{TENSORS}"

    def _rename(self, name: str) -> None:
        self._path = self._path.rename(self._path.with_name(name))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else -1


class NearTier:
    """The buffers of a near root, in the process that keeps it.

    Commits are sealed in the background. A commit is never sealed if the next one needs its memory before
    that. So the newest sealed commit may be one or two commits behind.

    Args:
        recalled: a commit at the near root that this process has mapped, if any.
        decided: called when there is no memory, when sealing failed, and when a commit is sealed.
    """

    def __init__(self, keeper: Keeper, recalled: Snapshot | None, clock: Clock, decided: Decided) -> None:
        self.keeper = keeper
        self._clock = clock
        self._decided = decided
        self._writer: dict[str, object] = {}
        self._limit = BUFFERS  # maximum number of buffers; smaller if memory was refused
        self._changed = threading.Condition()  # over the fields below
        found = {} if recalled is None else {recalled.id.name: recalled.arenas}
        folders = [each for each in keeper.path.iterdir() if each.is_dir() and not each.is_symlink()]
        self._buffers = [Buffer(folder, found.get(folder.name)) for folder in folders]
        self._waiting: Buffer | None = None  # the next buffer to seal
        self._sealing: Buffer | None = None
        self._stopped = False
        self._reserve = 0  # bytes of shared memory that are left to other programs
        self._thread: threading.Thread | None = None

    # -- on the training thread ------------------------------------------------------------------------

    def begin(self, writer: dict[str, object]) -> None:
        """After an agreement, use this writer in manifests, and try again to get memory that was refused."""
        self._writer, self._limit = writer, BUFFERS

    def acquire(self, layouts: Layouts, pinned: Set[Arena]) -> Mapping[str, Arena] | None:
        """Return memory for the next commit; None if it must use private memory this time.

        Args:
            layouts: layouts of the commit's files, by attribute name.
            pinned: arenas that are being read, and must not change.
        """
        if not layouts:
            return None  # a state without tensors is not worth a file
        with self._changed:
            newest = self._newest_sealed  # never overwritten
            free = [
                each
                for each in self._buffers
                if each is not newest and pinned.isdisjoint(each.arenas.values())
            ]
            # Take the buffer of an unsealed commit last, as that commit is then never sealed. It is still
            # better than private memory, where the next commit could not be sealed.
            unsealed = (self._sealing, self._waiting)
            buffer = min(free, key=lambda each: (each in unsealed, each.commit is not None), default=None)
            if (buffer is None or buffer in unsealed) and len(self._buffers) < self._limit:
                buffer = Buffer(self.keeper.path / f"{BUFFER}{uuid.uuid4().hex}")
                self._buffers.append(buffer)
            if buffer is None:
                return None
            self._open(buffer)
        if (reason := self._refusal(buffer, layouts)) is None:
            return buffer.arenas
        self._drop([buffer])
        self._limit = len(self._buffers)
        if self._limit < 2:  # with one buffer, its sealed commit could never be replaced
            self._give_back(reason)
        return None

    def seal(self, snapshot: Snapshot) -> None:
        """Seal a commit in the background, if it was copied into memory from `acquire`."""
        with self._changed:
            for buffer in self._buffers:
                if snapshot.arenas and buffer.arenas == snapshot.arenas:
                    buffer.snapshot = replace(snapshot, job=str(self._writer["job"]))
                    self._waiting = buffer
                    self._changed.notify_all()
                    if self._thread is None:
                        self._thread = threading.Thread(target=self._run, name="hvdrecover-near", daemon=True)
                        self._thread.start()

    def newest(self) -> Snapshot | None:
        """Return the newest commit that is sealed, if this process has made it."""
        newest = self._newest_sealed
        return None if newest is None else newest.snapshot

    def wait(self, timeout: float) -> bool:
        """Wait until all commits are sealed; return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and self._sealing is None, timeout)

    def stop(self) -> None:
        """End the thread, and let another process keep the near root. Sealed commits stay."""
        self._end_thread()
        self.keeper.release()

    def remove(self) -> None:
        """End the thread, and delete the near root."""
        self._end_thread()
        self.keeper.remove()

    def _refusal(self, buffer: Buffer, layouts: Layouts) -> str | None:
        """Make a buffer fit these layouts; return the reason if memory is too short."""
        try:
            if buffer.lacks(layouts):
                self._reserve = near_root.reserve(self.keeper.path)
                nbytes = sum(layout.nbytes for layout in layouts.values())
                if refused := near_root.refusal(self.keeper.path, nbytes):
                    return refused
            if buffer.layouts != layouts:
                buffer.fit(layouts)
        except OSError as error:
            return f"no memory for a commit: {error}"
        return None

    def _end_thread(self) -> None:
        with self._changed:
            self._stopped, self._sealing = True, None
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- with the lock held, or on either thread -------------------------------------------------------

    @property
    def _newest_sealed(self) -> Buffer | None:
        sealed = [(each.commit, each) for each in self._buffers if each.commit is not None]
        return max(sealed, key=lambda pair: pair[0])[1] if sealed else None

    def _open(self, buffer: Buffer) -> None:
        """Cancel the sealing of a buffer, and unseal it, before it is overwritten or deleted."""
        if self._waiting is buffer:
            self._waiting = None
        if self._sealing is buffer:
            self._sealing = None
        buffer.open()

    def _drop(self, buffers: list[Buffer]) -> None:
        with self._changed:
            for buffer in buffers:
                self._open(buffer)
                buffer.delete()
            self._buffers = [each for each in self._buffers if each not in buffers]

    def _give_back(self, reason: str) -> None:
        """Turn the tier off until the next agreement."""
        self._limit = 0
        self._drop(list(self._buffers))
        self._decided(reason, 0)

    # -- on the tier's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        step_back(_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._waiting)
                if self._stopped:
                    return
                buffer = self._sealing = self._waiting
                self._waiting = None
            try:
                if buffer is not None and buffer.snapshot is not None:
                    self._seal(buffer, buffer.snapshot)
            except Exception as error:  # training must not fail because of the tier
                with suppress(Exception):
                    self._decided(f"{self.keeper.path} cannot be used: {error!r}", 0)
            with self._changed:
                self._sealing = None
                self._changed.notify_all()

    def _seal(self, buffer: Buffer, snapshot: Snapshot) -> None:
        digests = snapshot.digests or self._digests(buffer)
        if digests is None:
            return
        files = [
            FileEntry(f"{name}{TENSORS}", arena.layout.nbytes, digests[name])
            for name, arena in buffer.arenas.items()
        ]
        writer = {**self._writer, "pid": os.getpid()}
        manifest = manifests.dumps(snapshot.manifest(files, writer, self._clock.now()))
        with self._changed:
            if self._sealing is not buffer:
                return  # the next commit has taken the buffer
            for each in self._buffers:
                if each is not buffer and each.commit == snapshot.id:
                    each.open()
            buffer.seal(snapshot.id, manifest)
            # Keep the commit before this one, in case this one is damaged. A commit with a later id belongs
            # to an earlier start of the job, whose generations may be higher than the next start's.
            numbers = sorted(each.commit for each in self._buffers if each.commit is not None)
            kept = numbers[: numbers.index(snapshot.id) + 1][-2:]
            for each in self._buffers:
                if each.commit not in kept:
                    each.open()
        self._decided(None, snapshot.nbytes)
        # Without a warning, the next allocation of another program would fail. So give it all back.
        free = shutil.disk_usage(self.keeper.path).free
        if free < self._reserve // 2:
            self._give_back(
                f"other programs had only {near_root.size(free)} left, so the tier's memory was given back"
            )

    def _digests(self, buffer: Buffer) -> dict[str, str] | None:
        """Return the digests of the files by attribute name; None if the memory was taken meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self._sealing is not buffer, _HEAD_START)
        digests = {name: Digest() for name in buffer.arenas}
        for name, arena in buffer.arenas.items():
            for start in range(0, len(arena.buffer), _PIECE):
                if self._sealing is not buffer:
                    return None
                digests[name].update(arena.buffer[start : start + _PIECE])
        return {name: each.hex() for name, each in digests.items()}


# -- files in huge pages -------------------------------------------------------------------------------
# A tmpfs has pages of 4 KB unless root mounted it otherwise. To map a gigabyte of them takes a core 0.1 to
# 0.3 s. So does unmapping: a killed process is not gone before that ends, so its death is noticed late. A
# process can ask for huge pages itself (MADV_COLLAPSE, Linux 6.1).

_MAP_FIXED = 0x10
_MADV_POPULATE_WRITE = 23  # since Linux 5.14
_MADV_COLLAPSE = 25
_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def _create(path: Path, nbytes: int) -> Bytes:
    """Create a file and map it, with all of its memory; OSError if the file system or the memory is full."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(file, nbytes)
        memory = _mapped(file, nbytes)
        # A huge page is made from the small pages that exist. One is enough, and costs least.
        for start in range(0, nbytes - HUGE_PAGE + 1, HUGE_PAGE):
            os.posix_fallocate(file, start, 1)
        _libc.madvise(memory.ctypes.data, nbytes // HUGE_PAGE * HUGE_PAGE, _MADV_COLLAPSE)
        # Reserve the rest now: a page that is missing later is not an error that Python sees, but SIGBUS.
        os.posix_fallocate(file, 0, nbytes)
        _libc.madvise(memory.ctypes.data, nbytes, _MADV_POPULATE_WRITE)
    finally:
        os.close(file)
    return memory


def _open_existing(path: Path) -> Bytes:
    """Map a file that another process made; OSError if it cannot be mapped."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        if not status.st_size:
            raise OSError(errno.EIO, "the file is empty")
        if status.st_blocks * 512 < status.st_size:  # a read of a hole in a full file system is SIGBUS
            os.posix_fallocate(file, 0, status.st_size)
        return _mapped(file, status.st_size)
    finally:
        os.close(file)


def _mapped(file: int, nbytes: int) -> Bytes:
    """Map a file at an address where its huge pages can be mapped as such; forked processes do not get it."""
    size = nbytes + HUGE_PAGE
    place = _map(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)  # addresses only, without memory
    start = -(-place // HUGE_PAGE) * HUGE_PAGE
    # If this fails, Linux may have given the addresses to another thread already: they must not be unmapped.
    _map(start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, file)
    _libc.madvise(place, size, mmap.MADV_DONTFORK)
    owner = (ctypes.c_uint8 * nbytes).from_address(start)
    weakref.finalize(owner, _unmap, place, size, os.getpid()).atexit = False
    return np.frombuffer(memoryview(owner), dtype=np.uint8)


def _map(address: int | None, nbytes: int, access: int, flags: int, file: int) -> int:
    place: int = _libc.mmap(address, nbytes, access, flags, file, 0)
    if place == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return place


def _unmap(place: int, size: int, owner: int) -> None:
    if os.getpid() == owner:  # a child has something else there
        _libc.munmap(place, size)
