"""Memory of a near root that a process beside its keeper reads, and that is not overwritten meanwhile."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from contextlib import suppress
from pathlib import Path

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.near import pages

_FLOCK = "hhqqi0q"  # struct flock of Linux, 64 bits


def borrowed(path: Path, layout: Layout) -> Arena:
    """Return a file as an arena that takes no memory of this process.

    While the arena exists, the process that keeps the near root does not overwrite the file. It may have
    overwritten it before: use the arena only if its digest is right.

    Args:
        path: the file.
        layout: of its content.

    Raises:
        OSError: the file cannot be mapped, is incomplete, or is about to be overwritten.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # A lock of the open file, not of the process, which may have others that borrow it.
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK))
        status = os.fstat(file)
        if status.st_size != layout.nbytes or status.st_blocks * 512 < status.st_size:
            raise OSError(f"{path} has holes")  # to read one takes memory, and may end in SIGBUS
        # Private, so that even a mistake of ours changes nothing of the file.
        memory = pages.mapped(file, layout.nbytes, mmap.MAP_PRIVATE)
    except BaseException:
        os.close(file)
        raise
    arena = Arena(layout, memory, borrowed=True)
    weakref.finalize(arena, _return, file, os.getpid())
    return arena


def kept(path: Path) -> int:
    """Keep others from borrowing a file, until the descriptor that is returned is closed.

    The lock is taken, and not only looked for: else a file could be borrowed between the look and the first
    byte that is overwritten, and its reader would see parts of two commits. It is one of the process, so that
    forked children, such as those of data loaders, don't hold it. Nothing else of this process may open and
    close the file meanwhile.

    Raises:
        OSError: another process has borrowed the file, or the file cannot be locked.
    """
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(file)
        raise
    return file


def is_locked(file: int) -> bool:
    """Return whether a lock keeps this process from one of its own; by asking, so that nobody finds it taken.

    Args:
        file: the descriptor of an open file.
    """
    answer = fcntl.fcntl(file, fcntl.F_GETLK, _lock(fcntl.F_WRLCK))
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _lock(kind: int) -> bytes:
    return struct.pack(_FLOCK, kind, 0, 0, 0, 0)


def _return(file: int, borrower: int) -> None:
    # Closing would not do: the mapping and children that were forked have the same open file. A child that
    # lets go of its copy of the arena must leave the lock alone, though.
    if os.getpid() == borrower:
        with suppress(OSError):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _lock(fcntl.F_UNLCK))
    os.close(file)
