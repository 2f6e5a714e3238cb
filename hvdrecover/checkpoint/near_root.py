"""The folder of a near root on a host, its one writing process (the keeper), and the limit of its memory.

::

    /dev/shm/hvdrecover-1000/          the near roots of one user, mode 0700
      0f3a…/                           the near root of one checkpoint root, by the digest of its URL
        root.json                      the checkpoint root's URL
        lock                           held by the keeper, the process that may change the folder
        g0003-c00000120/               a sealed commit, in the format of all checkpoint roots
        .hvdrecover-buffer-…/          memory for the next commit
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint.arena import digest
from hvdrecover.checkpoint.storage.local import mount_of
from hvdrecover.errors import StorageError
from hvdrecover.machine import available_memory
from hvdrecover.redaction import redact

SHARED_MEMORY = Path("/dev/shm")
BUFFERS = 3  # maximum number of commits for which a near root has memory
_OWNER = "root.json"
_LOCK = "lock"
_FLOOR = 1 << 28  # bytes of shared memory that are left to data loaders; containers have 64 MB
_kept: set[Path] = set()  # locked by this process, which its own lock would not stop


def base(near: str) -> Path:
    """Return the folder of this user's near roots; ``near`` is a folder, or ``auto`` for shared memory."""
    return (SHARED_MEMORY if near == "auto" else Path(near).absolute()) / f"hvdrecover-{os.getuid()}"


def named(url: str) -> str:
    """Return a checkpoint root as its storage names it, without connecting to any server."""
    protocol, separator, rest = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return redact(url).rstrip("/")
    return f"file://{Path(rest if separator else url).absolute()}"


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
    """The lock that allows a process to change a near root. One process of the host has it, until it ends.

    The lock belongs to the process, not to the open file: forked children do not have it.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Keeper | None:
        """Take the lock of a near root that exists; None if another state or process has it."""
        if path in _kept:
            return None
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else the keeper has just deleted the near root
                _kept.add(path)
                return cls(path, descriptor)
        except (PermissionError, BlockingIOError):
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def release(self) -> None:
        if self.path in _kept:
            _kept.discard(self.path)
            os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the near root, and the user's folder if it is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
        self.release()


@dataclass(frozen=True)
class NearRoot:
    """A near root of this user.

    Attributes:
        url: the checkpoint root that it belongs to; empty if unknown.
        used: when it was last written to, in seconds since the Unix epoch.
        in_use: whether a process has locked it.
    """

    path: Path
    url: str
    nbytes: int
    used: float
    in_use: bool


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
    """Return why a near root has no room for `BUFFERS` commits of ``nbytes`` each; None if it has room.

    In shared memory, a quarter must stay free for other programs, and a quarter of the free memory as well:
    training needs memory, too, and the kernel kills processes beyond a cgroup's limit.
    """
    status = os.statvfs(path)
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    need = max(0, BUFFERS * nbytes - usage(path))
    commits, spared = f"{BUFFERS} commits of {size(nbytes)}", 0
    if mount_of(path)[1] == "tmpfs":
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
