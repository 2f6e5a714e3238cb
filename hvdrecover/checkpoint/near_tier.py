"""The near tier: commits in a host's own memory, which outlive the processes that made them.

The memory that a commit is copied into *is* a file of the near root (`hvdrecover.checkpoint.near_root`):

1. `NearTier.acquire` takes the commit's name from a buffer's folder: it is hidden now, and no commit.
2. The training thread copies the next commit into the mapped files.
3. `NearTier.seal` has the tier's thread compute digests, write the manifest into the folder, and rename the
   folder to the commit's name.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover.checkpoint import layout as layouts_
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import near_root
from hvdrecover.checkpoint.arena import HUGE_PAGE, Arena, Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest, digest
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import TENSORS, FileEntry
from hvdrecover.checkpoint.near_root import Keeper
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.writer import step_back
from hvdrecover.clock import Clock
from hvdrecover.errors import CheckpointError, CorruptCheckpointError

BUFFER = f"{TEMPORARY}buffer-"
_NICENESS = 5  # of the tier's thread: behind training, but not by so much that steps overtake it
_HEAD_START = 0.005  # seconds for the ranks to end the commit; they wait for each other
_PIECE = 1 << 22  # bytes that are digested between two looks at whether the memory was taken
_FIRST = 2  # buffers: one for the newest sealed commit, one for the next; a third when both are in use
_PATIENCE = 10  # commits in a row with other tensors each, after which no memory is made for the next

Layouts = Mapping[str, Layout]
PassedOver = Callable[[str, str], None]
"""Called with the name of a commit that is not used, and the reason."""
Decided = Callable[[str | None, int], None]
"""Called with the reason why commits of so many bytes are not kept, or with None if they are."""


@dataclass(frozen=True)
class Recalled:
    """A commit of an earlier process.

    Attributes:
        snapshot: the commit.
        job: identity of the start of the job that made it, as ``JOB/START``.
    """

    snapshot: Snapshot
    job: str

    @property
    def start(self) -> str:
        """The identity of the start alone."""
        return self.job.rpartition("/")[2]


class Buffer:
    """Memory for one commit: a folder with a mapped file for each attribute that holds tensors.

    Args:
        path: the folder.
        arenas: the mapped files, by attribute name.

    Attributes:
        arenas: the mapped files, by attribute name.
        layouts: of the files, by attribute name.
        commit: the sealed commit that it holds, or None.
    """

    def __init__(self, path: Path, arenas: dict[str, Arena]) -> None:
        self._path = path
        self.arenas = arenas
        self.layouts = {name: arena.layout for name, arena in arenas.items()}
        self.commit = CommitId.parse(path.name) if (path / manifests.FILE_NAME).exists() else None

    @classmethod
    def make(cls, root: Path, layouts: Layouts) -> Buffer:
        """Make a buffer with all of its memory.

        Raises:
            OSError: the file system or the memory is full; no file is left.
        """
        path = root / f"{BUFFER}{uuid.uuid4().hex}"
        path.mkdir(mode=0o700)
        try:
            arenas = {}
            for name, layout in layouts.items():
                memory = _create(path / f"{name}{TENSORS}", layout.nbytes)
                arenas[name] = Arena(layout, memory, shared=True)
                arenas[name].take_back()  # writes the header
            return cls(path, arenas)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def found(cls, path: Path) -> Buffer:
        """Return the buffer that an earlier process left in a folder.

        Raises:
            OSError: a file cannot be mapped.
            ValueError: a file is not safetensors.
        """
        arenas = {}
        for file in sorted(path.glob(f"*{TENSORS}")):
            memory = _open_existing(file)
            header = memory[: layouts_.header_size(memory[:8].tobytes(), len(memory))].tobytes()
            layout = layouts_.parse(header, len(memory))
            arenas[file.name.removesuffix(TENSORS)] = Arena(layout, memory, shared=True)
        buffer = cls(path, arenas)
        if buffer.commit is None:  # its folder may have a commit's name still
            buffer._rename(f"{BUFFER}{uuid.uuid4().hex}")
        return buffer

    @property
    def nbytes(self) -> int:
        """The size of its files in bytes."""
        return sum(layout.nbytes for layout in self.layouts.values())

    def verified(self) -> Recalled:
        """Return the sealed commit, without a copy.

        Raises:
            CheckpointError: the manifest or a file is damaged.
            OSError: the manifest cannot be read.
        """
        manifest = manifests.loads(
            (self._path / manifests.FILE_NAME).read_bytes(), str(self._path), self.commit
        )
        found = _entries(self.layouts, {name: digest(arena.buffer) for name, arena in self.arenas.items()})
        if manifest.by_attribute != dict(zip(self.arenas, found, strict=True)):
            raise CorruptCheckpointError(str(self._path), "the files do not match the manifest's digests")
        return Recalled(Snapshot.of(manifest, self.arenas), str(manifest.writer.get("job", "")))

    def seal(self, commit: CommitId, manifest: bytes) -> None:
        """Make it a commit that other processes can read.

        Raises:
            OSError: the manifest cannot be written.
        """
        temporary = self._path / f"{TEMPORARY}manifest"
        temporary.write_bytes(manifest)
        temporary.replace(self._path / manifests.FILE_NAME)
        self._rename(commit.name)
        self.commit = commit

    def open(self) -> None:
        """Take away the commit that it holds, as its memory will be overwritten."""
        if self.commit is not None:
            self.commit = None
            (self._path / manifests.FILE_NAME).unlink(missing_ok=True)
            self._rename(f"{BUFFER}{uuid.uuid4().hex}")

    def delete(self) -> None:
        """Delete its files. A holder of its arenas keeps their memory."""
        shutil.rmtree(self._path, ignore_errors=True)

    def _rename(self, name: str) -> None:
        self._path = self._path.rename(self._path.with_name(name))


def left(path: Path, passed_over: PassedOver) -> list[Buffer]:
    """Return the buffers that earlier processes left at a near root, and delete what cannot be one.

    Args:
        path: the near root, which this process keeps.
        passed_over: told of commits that cannot be used.
    """
    buffers = []
    for folder in sorted(each for each in path.iterdir() if each.is_dir() and not each.is_symlink()):
        try:
            buffers.append(Buffer.found(folder))
        except (OSError, ValueError) as error:
            if CommitId.parse(folder.name) is not None:  # else its process was killed while it was made
                passed_over(folder.name, f"it cannot be mapped: {error}")
            shutil.rmtree(folder, ignore_errors=True)
    return buffers


def sealed(buffers: list[Buffer]) -> list[tuple[CommitId, Buffer]]:
    """Return the sealed commits and their buffers, newest first."""
    found = [(each.commit, each) for each in buffers if each.commit is not None]
    return sorted(found, key=lambda pair: pair[0], reverse=True)


def newest_verified(
    buffers: list[Buffer], usable: Callable[[CommitId], bool], passed_over: PassedOver
) -> Recalled | None:
    """Return the newest commit of buffers that verifies, without a copy.

    Args:
        buffers: what was `left`. A buffer whose commit is damaged holds none any more.
        usable: whether a commit may be used at all.
        passed_over: told of commits that are not used.
    """
    for commit, buffer in sealed(buffers):
        if usable(commit):
            try:
                return buffer.verified()
            except (CheckpointError, OSError) as error:
                passed_over(commit.name, str(error))
                buffer.open()
    return None


@dataclass(eq=False)
class _Commit:
    """A commit to be sealed: its buffer, its writer for the manifest, and whether its memory was taken."""

    snapshot: Snapshot
    buffer: Buffer
    writer: dict[str, Any]
    taken: threading.Event = field(default_factory=threading.Event)

    def digests(self) -> dict[str, str] | None:
        """Return the digests of the files by attribute name; None if the memory was taken meanwhile."""
        if self.snapshot.digests is not None:
            return self.snapshot.digests
        self.taken.wait(_HEAD_START)
        digests = {name: Digest() for name in self.buffer.arenas}
        for name, arena in self.buffer.arenas.items():
            for start in range(0, len(arena.buffer), _PIECE):
                if self.taken.is_set():
                    return None
                digests[name].update(arena.buffer[start : start + _PIECE])
        return {name: each.hex() for name, each in digests.items()}


class NearTier:
    """The buffers of a near root, in the process that keeps it.

    Commits are sealed in the background, or never if the next commit needs the memory sooner. So the newest
    sealed commit may be a commit or two behind.

    Args:
        keeper: the right to change the near root.
        buffers: what earlier processes `left` there.
        writer: returns the writer, for manifests; called on the training thread.
        clock: where times come from.
        decided: told when memory was made or refused, when a commit could not be sealed, and when one is
            sealed again.
    """

    def __init__(
        self,
        keeper: Keeper,
        buffers: list[Buffer],
        writer: Callable[[], dict[str, Any]],
        clock: Clock,
        decided: Decided,
    ) -> None:
        self.keeper = keeper
        self._writer = writer
        self._clock = clock
        self._decided = decided
        self._changed = threading.Condition()  # over the fields below
        self._buffers = buffers
        self._last: _Commit | None = None  # the newest that this process has sealed, while it is
        self._wanted: tuple[Layouts, int] | None = None  # layouts and number of buffers to make
        self._asked: tuple[Layouts, int] | None = None  # the same, of the last time
        self._waiting: _Commit | None = None  # to be sealed
        self._sealing: _Commit | None = None
        self._busy = self._stopped = False
        self._misses = 0  # times in a row that memory was asked for and did not fit the next commit
        self._failed = False  # since a commit was sealed last
        self._reserve = 0  # bytes of shared memory that are left to others
        self._thread: threading.Thread | None = None

    @property
    def has_memory(self) -> bool:
        """Return whether it has a buffer for any commit, free or not; it has none if memory was refused."""
        return bool(self._buffers)

    def acquire(self, layouts: Layouts, pinned: Set[Arena]) -> Mapping[str, Arena] | None:
        """Return memory that the next commit may be copied into; None if it has to go elsewhere this time.

        Args:
            layouts: of the commit's files, by attribute name.
            pinned: arenas that are being read, and must not change.
        """
        if not layouts:
            return None  # a state without tensors is not worth a file
        with self._changed:
            fitting = [each for each in self._buffers if each.layouts == layouts]
            newest = self._newest_sealed  # never overwritten
            free = [
                each for each in fitting if each is not newest and pinned.isdisjoint(each.arenas.values())
            ]
            # A commit that is not sealed yet goes last: it will never be. That beats private memory, which
            # could not be sealed either.
            unsealed = [each.buffer for each in (self._sealing, self._waiting) if each is not None]
            buffer = min(free, key=lambda each: (each in unsealed, each.commit is not None), default=None)
            if buffer is not None:
                self._misses = 0
                self._take(buffer)
        if buffer is None or buffer in unsealed:
            self._ask(layouts, near_root.BUFFERS if fitting else _FIRST)
        return None if buffer is None else buffer.arenas

    def want(self, layouts: Layouts) -> None:
        """Have memory made for commits of these layouts, if there is none."""
        if layouts and not any(each.layouts == layouts for each in self._buffers):
            self._ask(layouts, _FIRST)

    def newest(self) -> Recalled | None:
        """Return the newest commit that this process has sealed."""
        last = self._last
        return None if last is None else Recalled(last.snapshot, str(last.writer["job"]))

    def seal(self, snapshot: Snapshot) -> None:
        """Have a commit sealed that was copied into memory from `acquire`; pass over others."""
        with self._changed:
            arenas = snapshot.arenas
            for buffer in self._buffers:
                if arenas and all(buffer.arenas.get(name) is arena for name, arena in arenas.items()):
                    self._waiting = _Commit(snapshot, buffer, self._writer())
                    self._wake()

    def wait(self, timeout: float) -> bool:
        """Wait for so many seconds at most until all is made and sealed; return whether that is so."""

        def is_done() -> bool:
            return not (self._busy or self._wanted or self._waiting)

        with self._changed:
            return self._changed.wait_for(is_done, timeout)

    def stop(self) -> None:
        """End the thread, and let another process keep the near root. Sealed commits stay."""
        self._end_thread()
        self.keeper.release()

    def remove(self) -> None:
        """End the thread, and delete the near root."""
        self._end_thread()
        self.keeper.remove()

    # -- with the lock held ----------------------------------------------------------------------------

    @property
    def _newest_sealed(self) -> Buffer | None:
        return next((buffer for _, buffer in sealed(self._buffers)), None)

    def _take(self, buffer: Buffer) -> None:
        """Let a buffer be overwritten, or deleted."""
        if self._waiting is not None and self._waiting.buffer is buffer:
            self._waiting = None
        if self._sealing is not None and self._sealing.buffer is buffer:
            self._sealing.taken.set()
            self._sealing = None
        if self._last is not None and self._last.buffer is buffer:
            self._last = None
        buffer.open()

    def _drop(self, buffers: list[Buffer]) -> None:
        for buffer in buffers:
            self._take(buffer)
            self._buffers.remove(buffer)
            buffer.delete()

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdrecover-near", daemon=True)
            self._thread.start()

    # -- on the training thread ------------------------------------------------------------------------

    def _ask(self, layouts: Layouts, count: int) -> None:
        differs = self._asked is None or self._asked[0] != layouts
        self._misses += differs
        if self._misses == _PATIENCE and differs:
            self._decided(f"the tensors were others at {_PATIENCE} commits in a row", 0)
        if self._misses < _PATIENCE and (differs or self._asked is None or self._asked[1] < count):
            with self._changed:
                self._asked = self._wanted = (layouts, count)
                self._wake()

    def _end_thread(self) -> None:
        with self._changed:
            self._stopped = True
            if self._sealing is not None:
                self._sealing.taken.set()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # -- on the tier's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        step_back(_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._wanted or self._waiting)
                if self._stopped:
                    return
                wanted, self._wanted = self._wanted, None
                commit = None
                if wanted is None:
                    commit = self._sealing = self._waiting
                    self._waiting = None
                self._busy = True
            try:
                if wanted is not None:
                    self._make(*wanted)
                elif commit is not None:
                    self._seal(commit)
            except Exception as error:  # training never fails because of the tier
                self._failed = True
                with suppress(Exception):
                    self._decided(f"{self.keeper.path} cannot be used: {error!r}", 0)
            with self._changed:
                self._busy, self._sealing = False, None
                self._changed.notify_all()

    def _make(self, layouts: Layouts, count: int) -> None:
        """Make buffers for commits of these layouts, and delete those for others."""
        nbytes = sum(layout.nbytes for layout in layouts.values())
        with self._changed:
            self._drop(
                [
                    each
                    for each in self._buffers
                    if each.layouts != layouts and each is not self._newest_sealed
                ]
            )
            made = len([each for each in self._buffers if each.layouts == layouts])
        room = near_root.look(self.keeper.path)
        self._reserve, refused = room.reserve, near_root.refusal(room, nbytes, made * nbytes)
        while refused is None and made < count:
            try:
                buffer = Buffer.make(self.keeper.path, layouts)
            except OSError as error:
                refused = f"no memory for a commit: {error}"
                break
            made += 1
            with self._changed:
                self._buffers.append(buffer)
        if count == _FIRST:
            self._decided(refused, nbytes)

    def _seal(self, commit: _Commit) -> None:
        snapshot, buffer = commit.snapshot, commit.buffer
        digests = commit.digests()
        if digests is None:
            return
        files = _entries(buffer.layouts, digests)
        text = manifests.dumps(
            snapshot.manifest(files, {**commit.writer, "pid": os.getpid()}, self._clock.now())
        )
        with self._changed:
            if self._sealing is not commit:
                return  # the next commit has taken the buffer
            for each in self._buffers:
                if each is not buffer and each.commit == snapshot.id:
                    each.open()
            buffer.seal(snapshot.id, text)
            self._last = commit
            # The commit before it stays, and counts if this one turns out to be damaged. A later one is of a
            # start that is over: its generations can be higher than the next start's.
            older = [number for number, _ in sealed(self._buffers) if number < snapshot.id]
            for each in self._buffers:
                if each.commit not in (snapshot.id, *older[:1]):
                    each.open()
            self._drop([each for each in self._buffers if each.layouts != buffer.layouts])
        if self._failed:
            self._failed = False
            self._decided(None, buffer.nbytes)
        # Without a warning, the next allocation of another program would fail. So give it all back.
        free = shutil.disk_usage(self.keeper.path).free
        if free < self._reserve // 2:
            with self._changed:
                self._drop(list(self._buffers))
            reason = (
                f"other programs had only {near_root.size(free)} left, so the tier's memory was given back"
            )
            self._decided(reason, buffer.nbytes)


def _entries(layouts: Layouts, digests: Mapping[str, str]) -> list[FileEntry]:
    """Return the manifest's entries for the files of a commit."""
    return [FileEntry(f"{name}{TENSORS}", layout.nbytes, digests[name]) for name, layout in layouts.items()]


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
