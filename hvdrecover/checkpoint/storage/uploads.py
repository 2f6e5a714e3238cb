"""The files that a process has uploaded in parts, and which of them to copy from.

A part that did not change need not be sent again: the store copies it from a file that it has. The file
before the last one of the same name is copied from, not the last one. So two files in a row share no upload,
and bytes that rot in the store are found in one of them at most. Such a line of copies ends after
`LONGEST_LINE`: what has rotted does not stay for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LONGEST_LINE = 30


class Place(NamedTuple):
    """The place of an object: its bucket and its key."""

    bucket: str
    key: str


class Part(NamedTuple):
    """A part of an uploaded file.

    Attributes:
        digest: of its bytes, as they were in memory.
        tag: the store's own digest of them (their ETag), from when they were sent.
    """

    digest: str
    tag: str


@dataclass(frozen=True)
class Uploaded:
    """A file that has been uploaded in parts.

    Attributes:
        place: where it is.
        tag: the store's ETag of the whole file.
        size: bytes of each part but the last.
        parts: its parts, in order.
        copies: how many copies lie between it and a file of which all parts were sent.
    """

    place: Place
    tag: str
    size: int
    parts: tuple[Part, ...]
    copies: int = 0

    def same(self, number: int, digest: str, size: int) -> Part | None:
        """Return the part at a place, counted from 0, if it has the very bytes; else None.

        Args:
            number: of the part.
            digest: of the bytes that it should have.
            size: bytes of each part but the last.
        """
        if size != self.size or number >= len(self.parts) or self.parts[number].digest != digest:
            return None
        return self.parts[number]


class Uploads:
    """The last two files of each name that this process has uploaded."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Uploaded, ...]] = {}

    def source(self, place: Place) -> Uploaded | None:
        """Return the file to copy from into a new one; None if all of it is to be sent.

        Args:
            place: where the new one will be. One that is there already was part of an attempt that failed.
        """
        others = self._others(place)
        return others[0] if len(others) == 2 and others[0].copies < LONGEST_LINE else None

    def add(self, uploaded: Uploaded) -> None:
        """Take note of a file that is in the store now."""
        others = self._others(uploaded.place)
        self._last[_name(uploaded.place)] = (*others[-1:], uploaded)

    def forget(self, gone: Uploaded) -> None:
        """Copy no more from a file, which has been deleted or replaced."""
        self._last[_name(gone.place)] = tuple(
            each for each in self._last.get(_name(gone.place), ()) if each != gone
        )

    def _others(self, place: Place) -> tuple[Uploaded, ...]:
        return tuple(each for each in self._last.get(_name(place), ()) if each.place != place)


def _name(place: Place) -> str:
    return place.key.rpartition("/")[2]
