"""The place of a near root on a host, and the one process that keeps it.

::

    /dev/shm/hvdrecover-1000/          of one user, for nobody else to read
      0f3a…/                           of one checkpoint root, by the digest of its URL
        root.json                      which root that is
        lock                           held by the process that keeps it
        g0003-c00000120/               a commit, in the format of all checkpoint roots
        .hvdrecover-slot-…/            memory for the next one
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.near.loans import is_locked
from hvdrecover.errors import StorageError
from hvdrecover.redaction import redact

SHARED_MEMORY = Path("/dev/shm")
LIFETIME = 7 * 86400.0  # seconds without use after which another job may take the memory back
SLOT = ".hvdrecover-slot-"
SPARE_LIFETIME = 3600.0  # the same of memory in which no commit is sealed
_OWNER = "root.json"
_LOCK = "lock"
_USER = "hvdrecover-"
_kept: set[Path] = set()  # by this process: a lock of its own would not keep it out


def base(near: str) -> Path:
    """Return the folder that holds this user's near roots.

    Args:
        near: ``auto`` for the host's shared memory, or a folder.
    """
    return (SHARED_MEMORY if near == "auto" else Path(near).absolute()) / f"{_USER}{os.getuid()}"


def named(url: str) -> str:
    """Return a checkpoint root as its storage names it, without connecting to any server."""
    protocol, separator, rest = url.partition("://")
    if separator and protocol not in ("file", "local"):
        return redact(url).rstrip("/")
    return f"file://{Path(rest if separator else url).absolute()}"


def folder(near: str, url: str) -> Path:
    """Return where the near root of a checkpoint root lies; it may not exist yet.

    Args:
        near: as for `base`.
        url: the checkpoint root; see `named`.
    """
    return base(near) / digest(url.encode())[:16]


def check_private(path: Path) -> None:
    """Make sure that only this user can write to a near root.

    Raises:
        StorageError: the user's folder is another's, or others may write to it.
    """
    status = path.parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            str(path.parent),
            "it belongs to somebody else, or others can read or write it, so no commit is kept there. Remove "
            "it, or name another folder with near=.",
        )


def make(path: Path, url: str) -> None:
    """Make the folder of a near root, for this user only.

    Raises:
        StorageError: the user's folder is another's, or others may write to it.
        OSError: the folder can't be made.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    check_private(path)
    path.mkdir(mode=0o700, exist_ok=True)
    (path / _OWNER).write_text(json.dumps({"url": url}))


class Keeper:
    """The right to change a near root; held by one process of the host at most, and lost when that ends.

    The lock is one of the process, not of the open file: children that are forked do not have it.

    Args:
        path: the near root's folder.
        descriptor: of its lock.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, path: Path) -> Keeper | None:
        """Take the lock of a near root that exists; None if another state or process has it.

        Raises:
            OSError: the lock can't be opened.
            StorageError: the file system has no locks.
        """
        if path in _kept:
            return None
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise StorageError(
                str(path), f"its file system gives no lock: {error}. Name another folder with near=."
            ) from error
        if not os.fstat(descriptor).st_nlink:  # who kept it has just deleted it all
            os.close(descriptor)
            return None
        _kept.add(path)
        return cls(path, descriptor)

    def release(self) -> None:
        """Let another process keep the near root."""
        if self.path in _kept:
            _kept.discard(self.path)
            os.close(self._descriptor)

    def remove(self) -> None:
        """Delete the near root, with the user's folder if that is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
        self.release()


@dataclass(frozen=True)
class NearRoot:
    """A near root of this user, as others see it.

    Attributes:
        path: its folder.
        url: the checkpoint root that it belongs to; empty if that is not known.
        nbytes: what it takes in bytes.
        used: when it was last written to, in seconds since the Unix epoch.
        in_use: whether a process keeps it.
    """

    path: Path
    url: str
    nbytes: int
    used: float
    in_use: bool


def roots(near: str = "auto") -> list[NearRoot]:
    """Return this user's near roots, by path.

    Args:
        near: as for `base`.

    Raises:
        StorageError: the user's folder is another's, or others may write to it.
    """
    top = base(near)
    if not top.is_dir():
        return []
    check_private(top / "x")
    found = []
    for path in sorted(top.iterdir()):
        with suppress(FileNotFoundError):  # its job has ended just now, and has deleted it
            if path.is_dir() and not path.is_symlink():
                found.append(_seen(path))
    return found


def of_others(path: Path) -> Iterator[tuple[Path, int]]:
    """Return the near roots of the same checkpoint root that other users have on this host, and their ids.

    The user's folder is private, so only a privileged process finds any.

    Args:
        path: this user's near root; it may not exist yet.
    """
    for each in sorted(path.parent.parent.glob(f"{_USER}*/{path.name}")):
        with suppress(OSError):
            user = each.lstat().st_uid
            if user != os.getuid() and each.parent.name == f"{_USER}{user}":
                yield each, user


def expired(found: Sequence[NearRoot], now: float, lifetime: float = LIFETIME) -> list[NearRoot]:
    """Return the near roots that are not in use, and were not for longer than this. A pure function.

    Args:
        found: near roots of this user.
        now: seconds since the Unix epoch.
        lifetime: seconds.
    """
    return [each for each in found if not each.in_use and now - each.used > lifetime]


def remove(path: Path) -> bool:
    """Delete a near root that no process keeps; return whether it was deleted.

    Raises:
        OSError: its lock can't be opened.
        StorageError: its file system has no locks.
    """
    keeper = Keeper.take(path)
    if keeper is None:
        return False
    keeper.remove()
    return True


def trim(path: Path) -> None:
    """Delete what memory a near root has beside its sealed commits, if no process keeps it.

    Raises:
        OSError: its lock can't be opened.
        StorageError: its file system has no locks.
    """
    if (keeper := Keeper.take(path)) is not None:
        used = path.stat().st_mtime_ns
        for each in leftovers(path):
            if each.name.startswith(SLOT):
                shutil.rmtree(each, ignore_errors=True)
        os.utime(path, ns=(used, used))  # it is not in use by that
        keeper.release()


def _seen(path: Path) -> NearRoot:
    statuses = [status for each in path.rglob("*") if (status := _status(each)) is not None]
    files = [status for status in statuses if stat.S_ISREG(status.st_mode)]
    try:
        url = str(json.loads((path / _OWNER).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        url = ""
    # Writing through a mapping changes no file's time; renaming a commit changes its folder's.
    used = max((status.st_mtime for status in [*statuses, path.stat()]), default=0.0)
    nbytes = sum(status.st_blocks * 512 for status in files)
    return NearRoot(path, url, nbytes, used, _is_kept(path))


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.lstat()
    return None


def _is_kept(path: Path) -> bool:
    if path in _kept:
        return True
    with suppress(OSError):
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            return is_locked(descriptor)
        finally:
            os.close(descriptor)
    return False


def leftovers(path: Path) -> Iterator[Path]:
    """Return the folders of a near root that hold a commit, or memory for one."""
    for each in sorted(path.iterdir()):
        if each.is_dir() and not each.is_symlink():
            yield each
