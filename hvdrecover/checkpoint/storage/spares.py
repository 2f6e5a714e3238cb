"""Data files of deleted commits, kept to be written over.

A file system has to find blocks for a new file, and a disk that is thinly provisioned has to find room for
them; both have to take them back in the end. Writing over old blocks spares all that.

Somebody else may still read a deleted file: whoever has it open or mapped, as long as he likes. Such a file
is never written over. The kernel knows: it grants a write lease (see fcntl(2)) only on a file that
nobody else has open. It knows of processes on this host only, and so only file systems that no other host can
have mounted count.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import uuid
from pathlib import Path

from hvdrecover.checkpoint.storage.descriptors import opened
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.checkpoint.storage.mounted import kind_of

_OF_ONE_HOST = {"ext4", "xfs"}


class Spares:
    """The spare files of one root: at most one for each size of the files that the newest commit has.

    Args:
        root: the folder in which they lie, under names that are nobody else's business.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._newest: Path | None = None  # the folder that was written to last
        self._sizes: set[int] = set()  # of its files
        self._files: dict[int, Path] = {}

    def place(self, target: Path, nbytes: int) -> None:
        """Before a file is written: put a spare one of its size in its place, if there is one."""
        if target.parent != self._newest:
            self._newest = target.parent
            self._sizes = set()
        self._sizes.add(nbytes)
        spare = self._files.pop(nbytes, None)
        if spare is None:
            return
        try:
            if not os.path.lexists(target) and _is_nobody_elses(spare):
                spare.rename(target)
        except FileNotFoundError:  # a process that started just then has tidied up
            return
        spare.unlink(missing_ok=True)

    def keep(self, folder: Path) -> None:
        """Before a folder is deleted: take from it the files that the next commit can use."""
        if not _is_of_this_host(self._root):
            return
        for path in folder.iterdir():
            status = path.lstat()
            nbytes = status.st_size
            if nbytes in self._sizes and nbytes not in self._files and stat.S_ISREG(status.st_mode):
                spare = self._root / f"{TEMPORARY}{folder.name}-{uuid.uuid4().hex}"
                path.rename(spare)
                self._files[nbytes] = spare
        for nbytes in self._files.keys() - self._sizes:
            self._files.pop(nbytes).unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete them all."""
        while self._files:
            self._files.popitem()[1].unlink(missing_ok=True)


def folder_of(spare: Path) -> str:
    """The folder that a spare file was a part of; empty for those of earlier versions, which did not say."""
    return spare.name.removeprefix(TEMPORARY).rpartition("-")[0]


def _is_nobody_elses(path: Path) -> bool:
    """Return whether a file may be written over: it has one name, and nobody else has it open or mapped."""
    with opened(path, os.O_WRONLY | os.O_NOFOLLOW) as file:
        try:
            if os.fstat(file).st_nlink > 1:
                return False
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # who opens it must not kill us by SIGIO
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:  # somebody has it open; or it is another user's, or the kernel knows no leases
            return False
    return True


def _is_of_this_host(folder: Path) -> bool:
    """Return whether a folder's file system is one that no other host can have mounted."""
    return kind_of(folder) in _OF_ONE_HOST
