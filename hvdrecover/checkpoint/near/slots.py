"""Slots: folders of a near root with memory for one commit each, mapped so that they need no copy.

The folder of a slot has a hidden name. Once a commit was copied into it, that ends with the commit's name:
who knows the commit's digests can use it. With these in a manifest it is sealed, and has the commit's name
alone. That name is taken away before it is overwritten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np

from hvdrecover.checkpoint import layout as layouts
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import TENSORS
from hvdrecover.checkpoint.near import loans, pages
from hvdrecover.checkpoint.near.place import SLOT
from hvdrecover.checkpoint.storage.interface import TEMPORARY


class Slot:
    """Memory for one commit.

    Args:
        path: its folder.
        layouts: of its files, by attribute name.

    Attributes:
        layouts: of its files, by attribute name.
        arenas: by attribute name; empty until it is mapped.
        copied: the commit whose bytes it has, sealed or not; None if it has those of no whole one.
        commit: the commit that it was sealed with; None if it is not.
    """

    def __init__(self, path: Path, layouts: Mapping[str, Layout]) -> None:
        self._path = path
        self._hidden = f"{path.parent}/{SLOT}{uuid.uuid4().hex}"
        self.layouts = dict(layouts)
        self.arenas: dict[str, Arena] = {}
        self._kept: dict[str, int] = {}
        self.copied = of_folder(path)
        self.commit = CommitId.parse(path.name) if (path / manifests.FILE_NAME).exists() else None

    @classmethod
    def make(cls, root: Path, wanted: Mapping[str, Layout]) -> Slot:
        """Make a slot with all of its memory, so that no page of it is missing when it is written to.

        Raises:
            OSError: there is no room for it; nothing of it is left.
        """
        slot = cls(root / f"{SLOT}{uuid.uuid4().hex}", wanted)
        slot._path.mkdir(mode=0o700)
        try:
            slot.arenas = {name: _made(slot._file(name), layout) for name, layout in wanted.items()}
        except BaseException:
            shutil.rmtree(slot._path, ignore_errors=True)
            raise
        slot.look_up()
        return slot

    @classmethod
    def found(cls, path: Path) -> Slot:
        """Return the slot that a process which has ended left in a folder; it is not mapped.

        Raises:
            OSError: a file can't be read.
            ValueError: a file is nonsense.
        """
        files = sorted(path.glob(f"*{TENSORS}"))
        return cls(path, {file.name.removesuffix(TENSORS): _read_layout(file) for file in files})

    def map(self) -> None:
        """Map its files, unless that is done. Their pages are looked up when they are used, or before.

        Raises:
            OSError: a file can't be mapped.
        """
        if not self.arenas:
            self.arenas = {name: _opened(self._file(name), each) for name, each in self.layouts.items()}

    def borrow(self) -> None:
        """Map its files to be read alone, in a process that does not keep the near root.

        Raises:
            OSError: a file can't be mapped, or is not whole.
        """
        self.arenas = {name: loans.borrowed(self._file(name), each) for name, each in self.layouts.items()}

    def digests(self) -> dict[str, str]:
        """Map it, unless it is mapped, and return the digests of its files by attribute name.

        Raises:
            OSError: a file can't be mapped.
        """
        self.map()
        found = {name: Digest() for name in self.arenas}
        for name, arena in self.arenas.items():
            for piece in pages.resident(arena.buffer):
                found[name].update(piece)
        return {name: digest.hex() for name, digest in found.items()}

    def look_up(self) -> None:
        """Look up all pages, so that a commit is copied as fast as possible; other threads run meanwhile."""
        for arena in self.arenas.values():
            for _ in pages.resident(arena.buffer):
                pass

    @property
    def nbytes(self) -> int:
        """The size of its files in bytes."""
        return sum(layout.nbytes for layout in self.layouts.values())

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
        return self.layouts == wanted

    def take(self) -> bool:
        """Refuse borrowers until the slot has a whole commit; return False if another process reads it."""
        for name in self.layouts.keys() - self._kept.keys():
            try:
                self._kept[name] = loans.kept(self._file(name))
            except FileNotFoundError:  # then no process can borrow it
                continue
            except OSError:  # lent; or as many files are open as may be
                self.let_go()
                return False
        return True

    def let_go(self) -> None:
        """Let others borrow it."""
        for file in self._kept.values():
            os.close(file)
        self._kept.clear()

    def label(self, commit: CommitId) -> None:
        """Note that a whole commit was copied, which may be of use even if it is never sealed."""
        if self.commit is None:
            with contextlib.suppress(OSError):  # then they are of none
                self._rename(Path(f"{self._hidden}.{commit.name}"))
                self.copied = commit
        self.let_go()

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
        (self._path / temporary).replace(self._path / manifests.FILE_NAME)
        self._rename(target)
        self.commit = self.copied = commit

    def open(self) -> None:
        """Take the commit away that it holds, as its memory will be overwritten."""
        if self.copied is not None:
            self.commit = self.copied = None
            try:
                self._rename(Path(self._hidden))
            except OSError:  # the name alone makes it no commit
                (self._path / manifests.FILE_NAME).unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete it; who holds its arenas keeps their memory."""
        self.let_go()
        shutil.rmtree(self._path, ignore_errors=True)

    def _file(self, name: str) -> Path:
        return self._path / f"{name}{TENSORS}"

    def _rename(self, path: Path) -> None:
        self._path.rename(path)
        self._path = path


def of_folder(path: Path) -> CommitId | None:
    """Return the commit whose bytes are in a slot's folder, sealed or not; None if there is no whole one."""
    return CommitId.parse(path.name) or CommitId.parse(path.suffix[1:])


def _made(path: Path, layout: Layout) -> Arena:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        buffer = pages.allocated(file, layout.nbytes)
    finally:
        os.close(file)
    buffer[: len(layout.header)] = np.frombuffer(layout.header, dtype=np.uint8)
    return Arena(layout, buffer)


def _read_layout(path: Path) -> Layout:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        size = os.fstat(file).st_size
        length = layouts.header_size(os.pread(file, 8, 0), size)
        return layouts.parse(os.pread(file, length, 0), size)
    finally:
        os.close(file)


def _opened(path: Path, layout: Layout) -> Arena:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        status = os.fstat(file)
        if status.st_blocks * 512 < status.st_size:
            os.posix_fallocate(file, 0, layout.nbytes)  # whatever has made holes in it
        return Arena(layout, pages.mapped(file, layout.nbytes))
    finally:
        os.close(file)
