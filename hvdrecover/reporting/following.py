"""Following files while processes append lines to them: only what is new is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from hvdrecover import record
from hvdrecover.errors import ConfigError
from hvdrecover.record import Event

Parsed = TypeVar("Parsed")

_SUFFIX = ".jsonl"
_PIECE = 1 << 22  # bytes that are read at once; a line is shorter, or it is not an event
_BUDGET = 1 << 23  # bytes after which a look ends, so that whoever looks can be interrupted and can say so


@dataclass
class _File:
    """The place up to which a file has been read.

    Attributes:
        offset: where the first line begins that is not complete yet.
        seen: its size as far as it has been looked at.
        skipping: whether the line that begins at ``offset`` is one that is too long.
    """

    offset: int = 0
    seen: int = 0
    skipping: bool = False


class Lines(Generic[Parsed]):
    """Reads the files in a folder and below it, and at each look the lines that were appended since the last.

    A last line that is half-written is read when it is complete. Files are only ever appended to, so one
    that has become shorter is being copied anew, and is read on from where it was left.

    Args:
        folder: the folder; it need not exist yet.
        parse: makes of a line what it says; of one that was too long, it is given an empty text.
        longest: bytes of a line, from which on it is too long; None for `_PIECE`.

    Attributes:
        behind: whether the last look has left something unread, so that the next one need not wait.
        problem: why the last look could not see everything; empty if it could. The next one tries again.
    """

    def __init__(self, folder: Path, parse: Callable[[str], Parsed], *, longest: int | None = None) -> None:
        self._folder = folder
        self._parse = parse
        self._longest = longest
        self._files: dict[str, _File] = {}
        self.behind = False
        self.problem = ""

    @property
    def files(self) -> int:
        """Number of files that were found."""
        return len(self._files)

    def look(self) -> list[tuple[str, Parsed]]:
        """The lines that are new, parsed, each with its file.

        The lines of one file are in order, those of different files are not.
        """
        self.behind, self.problem = False, ""
        lines: list[tuple[str, Parsed]] = []
        piece = self._longest or _PIECE
        left = _BUDGET
        for path, size in list(self._sizes(os.fspath(self._folder))):
            file = self._files.setdefault(path, _File())
            while size > file.seen:
                if left <= 0:
                    self.behind = True
                    return lines
                data = self._read(path, file.offset, min(piece, size - file.offset))
                if file.offset + len(data) <= file.seen:
                    break  # it could not be read, or has become shorter
                left -= len(data)
                lines.extend((path, self._parse(line)) for line in _take(file, data, piece))
        return lines

    def _sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(folder) as found:
                entries = list(found)
        except OSError as error:
            self.problem = str(error)
            return
        for entry in entries:
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._sizes(entry.path)
                elif entry.name.endswith(_SUFFIX):
                    yield entry.path, entry.stat().st_size
            except OSError as error:
                self.problem = str(error)

    def _read(self, path: str, offset: int, count: int) -> bytes:
        try:
            with Path(path).open("rb", buffering=0) as file:
                file.seek(offset)
                return file.read(count) or b""
        except OSError as error:
            self.problem = str(error)
            return b""


class Follower:
    """Follows the record of a run; each event comes with the name of its process."""

    def __init__(self, folder: Path) -> None:
        self._record = record.Follower(folder)
        self.behind = False
        self.problem = ""

    def look(self) -> list[tuple[str, Event | None]]:
        """Return the events that are new."""
        self.problem = ""
        try:
            return [(f"{event.host}-{event.pid}", event) for event in self._record.look()]
        except ConfigError as error:
            self.problem = str(error)
            return []


def _take(file: _File, data: bytes, piece: int) -> Iterator[str]:
    """The complete lines of what follows a file's offset, which is moved on."""
    file.seen = file.offset + len(data)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == piece:
        file.skipping, end = True, len(data)
        file.offset += end
        return
    file.offset += end
    for line in data[:end].split(b"\n")[:-1]:
        yield "" if file.skipping else line.decode("utf-8", "replace")
        file.skipping = False
