"""The near tier: commits in a host's own memory, which outlive the processes that made them.

::

    /dev/shm/hvdrecover-1000/          the near roots of one user, mode 0700
      0f3a…/                           the near root of one checkpoint root, by the digest of its URL
        root.json                      the checkpoint root's URL
        lock                           held by the keeper, the process that may change the folder
        g0003-c00000120/               a sealed commit, in the format of all checkpoint roots
        .hvdrecover-buffer-…/          memory for the next commit

The memory that a commit is copied into *is* a folder of files there:

1. The tier's thread makes two buffers: folders of mapped files whose names are no commits' names. It makes a
   third one when both were in use. Until they are ready, the next commit waits if it is small; else it uses
   private memory.
2. `NearTier.acquire` returns a buffer, and deletes the manifest of the commit that was in it.
3. The training thread copies the next commit into the mapped files.
4. `NearTier.seal` has the thread compute digests, publish the manifest, and rename the folder to the commit's
   name.

So a process that is killed at any point leaves whole commits and hidden folders, never a torn commit. If the
next commit needs the memory before it is sealed, it is not sealed; the older one stays the newest that is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hvdrecover.checkpoint import CommitId, redact
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import Arena, Bytes, Layout, digest, map_file
from hvdrecover.checkpoint.manifest import TENSORS, Snapshot
from hvdrecover.checkpoint.storage import TEMPORARY, ReadBytes, Storage
from hvdrecover.checkpoint.storage.local import mount_of
from hvdrecover.checkpoint.store import step_back
from hvdrecover.errors import StorageError
from hvdrecover.machine import Clock, available_memory

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = 3  # maximum number of commits for which a near root has memory
BUFFER = f"{TEMPORARY}buffer-"
_OWNER = "root.json"
_LOCK = "lock"
_FLOOR = 1 << 28  # bytes of shared memory that are left to data loaders; containers have 64 MB
_NICENESS = 5  # niceness of the tier's thread: training comes first, but sealing keeps up with commits
_SMALL = 1 << 26  # bytes of a commit whose memory is made in some milliseconds
_PATIENCE = 1.0  # seconds that a small commit waits for its memory
_HEAD_START = 0.005  # seconds for the ranks to end the commit before sealing takes CPU time
_kept: dict[Path, int] = {}  # near roots that this process has locked: descriptors of the locks

Layouts = Mapping[str, Layout]
Decided = Callable[[str | None, int], None]
"""Called with the reason why the tier is off, or None if it is on, and the bytes of a commit."""


# -- the folder of a near root, and its keeper ---------------------------------------------------------


def base(near: str) -> Path:
    """Return the folder of this user's near roots; ``near`` is a folder, or ``auto`` for shared memory."""
    folder = SHARED_MEMORY if near == "auto" else Path(near).expanduser().absolute()
    return folder / f"hvdrecover-{os.getuid()}"


def named(url: str) -> str:
    """Return a checkpoint root as its storage names it, without connecting to any server."""
    protocol, separator, rest = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return redact(url).rstrip("/")
    path = rest if separator else url.removeprefix("file:").removeprefix("local:")
    return f"file://{Path(path).expanduser().absolute()}"


def folder(near: str, url: str) -> Path:
    """Return the path of the near root of a checkpoint root, existing or not; for the URL see `named`."""
    return base(near) / digest(url.encode())[:16]


def check_private(path: Path) -> None:
    """Raise `StorageError` if other users can read or write a near root."""
    status = path.parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            str(path.parent),
            "it belongs to another user, or others can read or write it, so no commit is kept there. Remove "
            "it, or name another folder with near=.",
        )


def make(path: Path, url: str) -> None:
    """Make the folder of a near root, for this user only."""
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    check_private(path)
    path.mkdir(mode=0o700, exist_ok=True)
    (path / _OWNER).write_text(json.dumps({"url": url}))


class Keeper:
    """The lock that allows a process to change a near root. One process of the host has it, until it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def take(cls, path: Path) -> Keeper | None:
        """Take the lock of a near root that exists; None if another state or process has it."""
        if path in _kept:  # its own lock would not stop this process, and closing the file would end it
            return None
        with ExitStack() as on_failure:
            descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            on_failure.callback(os.close, descriptor)
            with suppress(PermissionError, BlockingIOError):
                # Such a lock belongs to the process, not to the open file: forked children do not have it.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:  # else the keeper has just deleted the near root
                    on_failure.pop_all()
                    _kept[path] = descriptor
                    return cls(path)
        return None

    def release(self) -> None:
        if (descriptor := _kept.pop(self.path, None)) is not None:
            os.close(descriptor)

    def remove(self) -> None:
        """Delete the near root, and the user's folder if it is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
        self.release()


@dataclass(frozen=True)
class NearRoot:
    path: Path
    url: str  # the checkpoint root that it belongs to; empty if unknown
    nbytes: int
    used: float  # when it was last written to, in seconds since the Unix epoch
    in_use: bool  # whether a process has locked it


def roots(near: str = "auto") -> list[NearRoot]:
    """Return this user's near roots, by path; for ``near`` see `base`."""
    top = base(near)
    if not top.is_dir():
        return []
    check_private(top / "x")
    found = []
    for path in sorted(top.iterdir()):
        with suppress(FileNotFoundError):  # its job has just ended, and deleted it
            if path.is_dir() and not path.is_symlink():
                found.append(_seen(path))
    return found


def remove(path: Path) -> bool:
    """Delete a near root unless a process has locked it; return whether it was deleted."""
    keeper = Keeper.take(path)
    if keeper is not None:
        keeper.remove()
    return keeper is not None


def _seen(path: Path) -> NearRoot:
    try:
        url = str(json.loads((path / _OWNER).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        url = ""
    # A write through a mapping changes no file's time, but sealing a commit changes the time of the folders.
    used = max(each.st_mtime for each in _statuses(path))
    keeper = Keeper.take(path)  # a job that needs it just now retries at its next commit
    if keeper is not None:
        keeper.release()
    return NearRoot(path, url, usage(path), used, in_use=keeper is None)


def usage(path: Path) -> int:
    return sum(status.st_blocks * 512 for status in _statuses(path) if stat.S_ISREG(status.st_mode))


def _statuses(path: Path) -> list[os.stat_result]:
    statuses = [path.stat()]
    for each in path.rglob("*"):
        with suppress(OSError):
            statuses.append(each.lstat())
    return statuses


def refusal(path: Path, nbytes: int) -> str | None:
    """Return why a near root has no room for `BUFFERS` commits of ``nbytes`` each; None if it has room."""
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    need = max(0, BUFFERS * nbytes - usage(path))
    commits, spared = f"{BUFFERS} commits of {size(nbytes)}", 0
    if mount_of(path)[1] == "tmpfs":
        # A quarter of shared memory must stay free for other programs, and a quarter of the free memory:
        # training needs memory, too, and the kernel kills processes beyond a cgroup's limit.
        spared = max(total // 4, _FLOOR)
        if need > (left := available_memory().nbytes) * 3 // 4:
            return f"{commits} are too much for the {size(left)} of memory left"
    if need > free - spared:
        return (
            f"{commits} do not fit into the {size(free)} that are free, of which {size(spared)} must stay "
            "free for data loaders"
        )
    return None


def size(nbytes: float) -> str:
    """Return a number of bytes in decimal units, with three digits: ``1.35 GB``."""
    units = ["B", "kB", "MB", "GB", "TB", "PB", "EB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.3g} {units[0]}"


# -- buffers -------------------------------------------------------------------------------------------


class Buffer:
    """Memory for one commit: a folder with a mapped file for each attribute that holds tensors."""

    def __init__(self, path: Path, arenas: Mapping[str, Arena] | None = None) -> None:
        self._path = path
        # By attribute name; empty if an earlier process left the folder.
        self.arenas: dict[str, Arena] = dict(arenas or {})
        # The sealed commit that it holds.
        self.commit = CommitId.parse(path.name) if (path / manifests.FILE_NAME).exists() else None
        # The commit that this process has copied into it and sealed, or is to seal.
        self.snapshot: Snapshot | None = None

    @property
    def awaits_seal(self) -> bool:
        return self.snapshot is not None and self.commit is None

    def fits(self, layouts: Layouts) -> bool:
        return {name: arena.layout for name, arena in self.arenas.items()} == layouts

    def make(self, layouts: Layouts) -> None:
        """Map files for commits of these layouts; reuse the memory of files that an earlier process left."""
        self._path.mkdir(mode=0o700, exist_ok=True)
        files = {name: self._path / f"{name}{TENSORS}" for name in layouts}
        for file in set(self._path.iterdir()).difference(files.values()):
            file.unlink()
        for name, layout in layouts.items():
            self.arenas[name] = Arena(layout, map_file(files[name], layout.nbytes), shared=True)
            self.arenas[name].take_back()
            os.utime(files[name], (0, 0))  # see `touch`

    def seal(self, commit: CommitId, manifest: bytes) -> None:
        """Publish the buffer as a commit that other processes can read."""
        temporary = self._path / f"{TEMPORARY}manifest"
        temporary.write_bytes(manifest)
        temporary.replace(self._path / manifests.FILE_NAME)
        self._path = self._path.rename(self._path.with_name(commit.name))
        self.commit = commit

    def open(self) -> None:
        """Unseal the commit in the buffer before its memory is overwritten; or do not seal it any more."""
        self.snapshot = None
        if self.commit is not None:
            self.commit = None
            with suppress(FileNotFoundError):  # the folder was deleted, but the mapped memory still exists
                (self._path / manifests.FILE_NAME).unlink(missing_ok=True)
                self._path = self._path.rename(self._path.with_name(f"{BUFFER}{uuid.uuid4().hex}"))

    def touch(self) -> None:
        """Set the time by which `unsealed` finds the newest buffer: writes through mappings may not."""
        with suppress(OSError):  # the folder was deleted
            os.utime(self._path / f"{next(iter(self.arenas))}{TENSORS}")

    def delete(self) -> None:
        self.open()
        shutil.rmtree(self._path, ignore_errors=True)  # a holder of the arenas keeps their memory


class NearTier:
    """The buffers of a near root, in the process that keeps it."""

    def __init__(
        self, keeper: Keeper, mapped: Mapping[str, Mapping[str, Arena]], clock: Clock, decided: Decided
    ) -> None:
        self.keeper = keeper
        self._clock = clock
        self._decided = decided  # called if memory is refused, if sealing fails, and for each sealed commit
        self._writer: dict[str, object] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # over the fields below
        # ``mapped``: the files that this process has mapped, by the names of their folders.
        folders = [each for each in keeper.path.iterdir() if each.is_dir() and not each.is_symlink()]
        self._buffers = [Buffer(folder, mapped.get(folder.name)) for folder in folders]
        sealed = [each for each in self._buffers if each.commit is not None]
        self._newest = max(sealed, key=lambda each: (bool(each.arenas), each.commit), default=None)
        self._wanted: tuple[Layouts, int] | None = None  # how many buffers to make
        self._refused = False  # whether there was no memory for another buffer since `begin`
        self._waiting: Buffer | None = None  # the next buffer to seal
        self._stopped = False

    # -- on the training thread ------------------------------------------------------------------------

    def begin(self, writer: dict[str, object]) -> None:
        """After an agreement, use this writer in manifests, and try again to get memory that was refused."""
        self._writer, self._refused = writer, False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hvdrecover-near", daemon=True)
            self._thread.start()

    def acquire(self, layouts: Layouts, pinned: Set[Arena]) -> Mapping[str, Arena] | None:
        """Return memory for the next commit, without changing ``pinned`` arenas; None if there is none."""
        if not layouts:
            return None  # a state without tensors is not worth a file
        with self._changed:
            if not self._fitting(layouts) and _nbytes(layouts) <= _SMALL:
                self._want(layouts, 2)
                self._changed.wait_for(lambda: self._wanted is None, _PATIENCE)
            fitting = self._fitting(layouts)
            usable = [each for each in fitting if each is not self._newest]
            free = [each for each in usable if pinned.isdisjoint(each.arenas.values())]
            # Take the buffer of an unsealed commit last, as that commit is then never sealed. It is still
            # better than private memory, where the next commit could not be sealed.
            best = min(free, key=lambda each: (each.awaits_seal, each.commit is not None), default=None)
            if best is None or best.awaits_seal:
                self._want(layouts, 2 if len(fitting) < 2 else BUFFERS)
            if best is None:
                return None
            best.open()
            best.touch()
            return best.arenas

    def seal(self, snapshot: Snapshot) -> None:
        """Seal a commit in the background, if it was copied into memory from `acquire`."""
        with self._changed:
            self._want(snapshot.layouts, 2)
            for buffer in self._buffers:
                if snapshot.arenas and buffer.arenas == snapshot.arenas:
                    waiting = self._waiting
                    if waiting is not None and waiting is not buffer and waiting.awaits_seal:
                        waiting.open()
                    buffer.snapshot = replace(snapshot, job=str(self._writer["job"]))
                    self._waiting = buffer
                    self._changed.notify_all()

    @property
    def has_memory(self) -> bool:
        return not self._refused

    def newest(self) -> Snapshot | None:
        """Return the newest commit that is sealed, if this process has made it."""
        newest = self._newest  # the tier's thread may change it meanwhile
        return None if newest is None else newest.snapshot

    def digests(self, snapshot: Snapshot, timeout: float) -> dict[str, str] | None:
        """Wait until a commit is sealed, and return its digests; None if it is not sealed by then."""
        with self._changed:
            holding = [each for each in self._buffers if each.arenas == snapshot.arenas]
            self._changed.wait_for(lambda: not any(each.awaits_seal for each in holding), timeout)
            sealed = [each.snapshot for each in holding if each.commit == snapshot.id]
        return sealed[0].digests if sealed and sealed[0] is not None else None

    def wait(self, timeout: float) -> bool:
        """Wait until all commits are sealed and buffers made; return False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not (self._wanted or self._waiting or any(b.awaits_seal for b in self._buffers)),
                timeout,
            )

    def remove(self) -> None:
        """End the thread, and delete the near root."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        self.keeper.remove()

    def _fitting(self, layouts: Layouts) -> list[Buffer]:
        return [each for each in self._buffers if each.fits(layouts)]

    def _want(self, layouts: Layouts, count: int) -> None:
        if layouts and len(self._fitting(layouts)) < count and not self._refused:
            self._wanted = layouts, count
            self._changed.notify_all()

    # -- on the tier's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        step_back(_NICENESS)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._wanted or self._waiting)
                if self._stopped:
                    return
                wanted, buffer = self._wanted, None
                if wanted is None:
                    buffer, self._waiting = self._waiting, None
            try:
                if wanted is not None:
                    self._make(*wanted)
                elif buffer is not None and buffer.snapshot is not None:
                    self._seal(buffer, buffer.snapshot)
            except Exception as error:  # training must not fail because of the tier
                with suppress(Exception):
                    self._decided(f"{self.keeper.path} cannot be used: {error!r}", 0)
            with self._changed:
                if buffer is not None and buffer.awaits_seal and buffer is not self._waiting:
                    buffer.snapshot = None  # sealing failed
                if self._wanted is wanted:
                    self._wanted = None
                self._changed.notify_all()

    def _make(self, layouts: Layouts, count: int) -> None:
        """Make buffers until ``count`` of them fit these layouts."""
        left = []  # folders of an earlier process, whose memory can be reused
        with self._changed:
            useful = [*self._fitting(layouts), self._newest, self._waiting]
            for each in [each for each in self._buffers if each not in useful]:
                self._buffers.remove(each)
                if each.arenas:
                    each.delete()
                else:
                    each.open()
                    left.append(each)
            missing, reason = count - len(self._fitting(layouts)), None
        if len(left) < missing:
            reason = refusal(self.keeper.path, _nbytes(layouts))
        for _ in range(0 if reason else missing):
            buffer = left.pop() if left else Buffer(self.keeper.path / f"{BUFFER}{uuid.uuid4().hex}")
            try:
                buffer.make(layouts)
            except OSError as error:
                reason = f"no memory for a commit: {error}"
                buffer.delete()
                break
            with self._changed:
                self._buffers.append(buffer)
        for each in left:
            each.delete()
        if reason is None:
            return
        with self._changed:
            self._refused = True
            if len(self._fitting(layouts)) >= 2:
                return
            for each in self._buffers:  # a single buffer's sealed commit could never be replaced
                each.delete()
            self._buffers, self._newest = [], None
        self._decided(reason, 0)

    def _seal(self, buffer: Buffer, snapshot: Snapshot) -> None:
        with self._changed:
            self._changed.wait_for(lambda: buffer.snapshot is not snapshot, _HEAD_START)
        digests = snapshot.digested().digests or {}
        writer = {**self._writer, "pid": os.getpid()}
        manifest = manifests.dumps(snapshot.manifest(digests, writer, self._clock.now()))
        with self._changed:
            if self._stopped or buffer.snapshot is not snapshot:
                return  # the next commit has taken the buffer
            # Keep the commit before this one, in case this one is damaged. A commit with a later id belongs
            # to an earlier start of the job, whose generations may be higher than the next start's.
            others = {each: each.commit for each in self._buffers if each is not buffer and each.commit}
            earlier = sorted(
                (each for each, commit in others.items() if commit < snapshot.id),
                key=lambda each: others[each],
            )
            self._open([each for each in others if each not in earlier], snapshot.layouts)
            buffer.seal(snapshot.id, manifest)
            buffer.snapshot = replace(snapshot, digests=digests)
            self._newest = buffer
            # Not before: a buffer holds no usable commit while it is sealed again, and a kill may come then.
            self._open(earlier[:-1], snapshot.layouts)
        self._decided(None, snapshot.nbytes)

    def _open(self, buffers: Sequence[Buffer], layouts: Layouts) -> None:
        """Unseal buffers, and delete those that do not fit the next commit."""
        for each in buffers:
            each.open()
            if not each.fits(layouts):
                each.delete()
                self._buffers.remove(each)


def _nbytes(layouts: Layouts) -> int:
    return sum(each.nbytes for each in layouts.values())


def unsealed(path: Path, layouts: Layouts) -> tuple[str, dict[str, Arena]] | None:
    """Map the files of a near root that were copied into last, but not sealed, if they have these sizes.

    Return them with the name of their folder; None if there are none. Only for the keeper.
    """
    sizes = {f"{name}{TENSORS}": layout.nbytes for name, layout in layouts.items()}
    found = []
    for folder in path.glob(f"{BUFFER}*"):
        statuses = {file.name: file.lstat() for file in folder.glob(f"*{TENSORS}")}
        if sizes and {name: status.st_size for name, status in statuses.items()} == sizes:
            found.append((max(status.st_mtime_ns for status in statuses.values()), folder))
    if not found:
        return None
    folder, arenas = max(found)[1], {}
    for name, layout in layouts.items():
        arenas[name] = Arena(layout, map_file(folder / f"{name}{TENSORS}", layout.nbytes), shared=True)
        arenas[name].take_back()  # the process before this one may not have written the header
    return folder.name, arenas


def mapped(storage: Storage, path: str, size: int) -> tuple[Bytes, ReadBytes]:
    """Map a file of the near root without a copy, and compute its digest. Only for the keeper."""
    memory = map_file(Path(storage.url.removeprefix("file://")) / path, size)
    return memory, ReadBytes(size, digest(memory))
