"""Slots: folders of a near root with memory for one commit each, mapped so that they need no copy.

While a commit is copied into a slot, its folder has a hidden name. It gets the commit's name, and then a
manifest, when it holds a whole one; both are taken away before the slot is overwritten.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from hvdrecover.checkpoint import layout as layouts
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import Arena, Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.near.place import SLOT
from hvdrecover.checkpoint.root import TENSORS
from hvdrecover.checkpoint.storage.interface import TEMPORARY


class Slot:
    """Memory for one commit.

    Args:
        path: its folder.
        arenas: by attribute name.

    Attributes:
        arenas: by attribute name.
        commit: the commit that it holds; None if it holds no whole one.
    """

    def __init__(self, path: Path, arenas: dict[str, Arena]) -> None:
        self._path = path
        self.arenas = arenas
        self.commit: CommitId | None = None

    @classmethod
    def make(cls, root: Path, wanted: Mapping[str, Layout]) -> Slot:
        """Make a slot with all of its memory, so that no page of it is missing when it is written to.

        Raises:
            OSError: there is no room for it; nothing of it is left.
        """
        path = root / f"{SLOT}{uuid.uuid4().hex}"
        path.mkdir(mode=0o700)
        try:
            return cls(path, {name: _made(path / f"{name}{TENSORS}", each) for name, each in wanted.items()})
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    @classmethod
    def found(cls, path: Path) -> Slot:
        """Return the slot that a process which has ended left in a folder.

        Raises:
            OSError: a file can't be mapped.
            ValueError: a file is nonsense.
        """
        files = sorted(path.glob(f"*{TENSORS}"))
        slot = cls(path, {file.name.removesuffix(TENSORS): _opened(file) for file in files})
        slot.commit = CommitId.parse(path.name)
        return slot

    @property
    def nbytes(self) -> int:
        """The size of its files in bytes."""
        return sum(arena.layout.nbytes for arena in self.arenas.values())

    def holds(self, arenas: Mapping[str, Arena]) -> bool:
        """Return whether these are its arenas; a slot without any holds nothing."""
        return (
            bool(arenas)
            and self.arenas.keys() == arenas.keys()
            and all(self.arenas[name] is arena for name, arena in arenas.items())
        )

    def shares(self, arenas: Collection[Arena]) -> bool:
        """Return whether any of these is one of its arenas."""
        return any(arena in arenas for arena in self.arenas.values())

    def fits(self, wanted: Mapping[str, Layout]) -> bool:
        """Return whether a commit of these layouts fits it exactly."""
        return {name: arena.layout for name, arena in self.arenas.items()} == dict(wanted)

    def seal(self, commit: CommitId, manifest: bytes) -> None:
        """Make it a commit that other processes can read.

        Raises:
            OSError: it can't be.
        """
        target = self._path.with_name(commit.name)
        if target != self._path and target.exists():
            shutil.rmtree(target)  # of a process before this one
        temporary = f"{TEMPORARY}{uuid.uuid4().hex}"
        try:
            (self._path / temporary).write_bytes(manifest)
        except OSError:  # no space; there would be one more of them with each commit
            (self._path / temporary).unlink(missing_ok=True)
            raise
        self._path.rename(target)
        self._path = target
        (target / temporary).replace(target / manifests.FILE_NAME)
        self.commit = commit

    def open(self) -> None:
        """Take the commit away that it holds, as its memory will be overwritten."""
        if self.commit is not None:
            self.commit = None
            with contextlib.suppress(FileNotFoundError):
                (self._path / manifests.FILE_NAME).unlink()
            with contextlib.suppress(OSError):  # the name alone makes it no commit
                hidden = self._path.with_name(f"{SLOT}{uuid.uuid4().hex}")
                self._path.rename(hidden)
                self._path = hidden

    def delete(self) -> None:
        """Delete it; who holds its arenas keeps their memory."""
        shutil.rmtree(self._path, ignore_errors=True)


def _made(path: Path, layout: Layout) -> Arena:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # All of it now: a page that can't be had later is not an error that Python sees, but SIGBUS.
        os.posix_fallocate(file, 0, layout.nbytes)
        buffer = _mapped(file, layout.nbytes)
    finally:
        os.close(file)
    buffer[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
    return Arena(layout, buffer)


def _opened(path: Path) -> Arena:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(file).st_size
        if os.fstat(file).st_blocks * 512 < size:
            os.posix_fallocate(file, 0, size)  # whatever has made holes in it
        buffer = _mapped(file, size)
    finally:
        os.close(file)
    header = buffer[: layouts.header_size(buffer[:8].tobytes(), size)].tobytes()
    return Arena(layouts.parse(header, size), buffer)


def _mapped(file: int, nbytes: int) -> Bytes:
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    memory.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(memory, dtype=np.uint8)
