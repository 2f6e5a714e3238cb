"""The folder of a near root on a host, and the one process that may change it.

::

    /dev/shm/hvdrecover-1000/          of one user, mode 0700
      0f3a…/                           of one checkpoint root, by the digest of its URL
        root.json                      which root that is
        lock                           held by the keeper, the process that may change the folder
        g0003-c00000120/               a sealed commit, in the format of all checkpoint roots
        .hvdrecover-buffer-…/          memory for the next commit
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint.digest import digest
from hvdrecover.errors import StorageError
from hvdrecover.redaction import redact

SHARED_MEMORY = Path("/dev/shm")
_OWNER = "root.json"
_LOCK = "lock"
_FLOCK = "hhqqi0q"  # struct flock of Linux, 64 bits
_kept: set[Path] = set()  # by this process: its own lock does not keep it out


def base(near: str) -> Path:
    """Return the folder that holds this user's near roots.

    Args:
        near: ``auto`` for the host's shared memory, or a folder.
    """
    return (SHARED_MEMORY if near == "auto" else Path(near).absolute()) / f"hvdrecover-{os.getuid()}"


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
    """Make sure that only this user can read and write a near root.

    Raises:
        StorageError: the user's folder belongs to another user, or others have access to it.
    """
    status = path.parent.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(
            str(path.parent),
            "it belongs to another user, or others can read or write it, so no commit is kept there. Remove "
            "it, or name another folder with near=.",
        )


def make(path: Path, url: str) -> None:
    """Make the folder of a near root, for this user only.

    Raises:
        StorageError: the user's folder belongs to another user, or others have access to it.
        OSError: the folder cannot be made.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.parent.mkdir(mode=0o700)
    check_private(path)
    path.mkdir(mode=0o700, exist_ok=True)
    (path / _OWNER).write_text(json.dumps({"url": url}))


class Keeper:
    """The right to change a near root. One process of the host has it, and loses it when it ends.

    The lock belongs to the process, not to the open file: forked children do not have it.

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
            OSError: the lock cannot be opened.
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
        if not os.fstat(descriptor).st_nlink:  # the keeper has just deleted the near root
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
        """Delete the near root, and the user's folder if it is empty then."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()
        self.release()


@dataclass(frozen=True)
class NearRoot:
    """A near root of this user.

    Attributes:
        path: its folder.
        url: the checkpoint root that it belongs to; empty if that is not known.
        nbytes: its size in bytes.
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
        StorageError: the user's folder belongs to another user, or others have access to it.
    """
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
    """Delete a near root that no process keeps; return whether it was deleted.

    Raises:
        OSError: its lock cannot be opened.
        StorageError: its file system has no locks.
    """
    keeper = Keeper.take(path)
    if keeper is None:
        return False
    keeper.remove()
    return True


def _seen(path: Path) -> NearRoot:
    statuses = [path.stat()]
    for each in path.rglob("*"):
        with suppress(OSError):
            statuses.append(each.lstat())
    try:
        url = str(json.loads((path / _OWNER).read_text())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        url = ""
    nbytes = sum(status.st_blocks * 512 for status in statuses if stat.S_ISREG(status.st_mode))
    # A write through a mapping changes no file's time. A commit that is sealed changes its folder's.
    return NearRoot(path, url, nbytes, max(status.st_mtime for status in statuses), _is_kept(path))


def _is_kept(path: Path) -> bool:
    if path in _kept:
        return True
    with suppress(OSError):
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            # Ask for the lock's owner. To take the lock for a moment would keep a job from taking it.
            wanted = struct.pack(_FLOCK, fcntl.F_WRLCK, 0, 0, 0, 0)
            answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted)
            return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
        finally:
            os.close(descriptor)
    return False
