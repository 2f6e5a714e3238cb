"""Fingerprints of files: names, sizes, the store's own tags, and samples of their bytes, or all of them.

Times of modification play no part: a copy has others. Stores of objects give a tag for each file, and then no
file is read. Otherwise blocks of some files are: their first, their last, and more the larger they are. Which
files and which blocks depends on each file's name and size alone, so files that come or go leave the others'
samples comparable.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.data.fingerprints import contents, ranges
from hvdrecover.data.fingerprints.contents import Found
from hvdrecover.data.fingerprints.places import Entry, Place, look
from hvdrecover.data.fingerprints.ranges import CONTENT_BITS, File, Range
from hvdrecover.data.fingerprints.sampling import hexadecimal, short

MAX_LIST = 44_000  # bytes of JSON for the list of files or ranges


@dataclass(frozen=True)
class Files:
    """The facts known about files.

    Attributes:
        count: how many there are.
        nbytes: bytes of all of them.
        tag: which of the store's own tags were used, or None.
        exact: whether each range is one file.
        ranges: the files, or ranges of their names; see `hvdrecover.data.fingerprints.ranges`.
        samples: digests of blocks of some files, by name.
    """

    count: int
    nbytes: int
    tag: str | None
    exact: bool
    ranges: tuple[Range, ...]
    samples: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return {
            "count": self.count,
            "bytes": self.nbytes,
            "tag": self.tag,
            "exact": self.exact,
            "ranges": [_row(each) for each in self.ranges],
            "samples": dict(self.samples),
        }

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Files:
        """The inverse of `as_json`; raises KeyError, TypeError or ValueError for what can't be one."""
        tag = fields["tag"]
        return Files(
            int(fields["count"]),
            int(fields["bytes"]),
            None if tag is None else str(tag),
            bool(fields["exact"]),
            tuple(_range(row) for row in fields["ranges"]),
            {str(name): str(text) for name, text in dict(fields["samples"]).items()},
        )


def _row(each: Range) -> list[Any]:
    digests = (each.listing, 64), (each.tags, 64), (each.content, CONTENT_BITS)
    return [
        each.first,
        each.count,
        each.nbytes,
        *(None if number is None else hexadecimal(number, bits) for number, bits in digests),
    ]


def _range(row: Any) -> Range:
    first, count, nbytes, *digests = row[:6]
    listing, tags, content = (None if text is None else int(text, 16) for text in digests)
    if listing is None:
        raise ValueError("a range of files has no digest")
    return Range(str(first), int(count), int(nbytes), listing, tags, content)


def take(urls: Sequence[str], full: bool, clock: Clock, most: int = MAX_LIST) -> Files:
    """The fingerprint of files.

    Args:
        urls: paths and URLs of files and folders, with or without wildcards.
        full: whether to read every byte.
        clock: pauses between attempts to reach a storage.
        most: bytes of JSON that the list of files may take.

    Raises:
        ConfigError: there is nothing at one of them, or something that is neither a file nor a folder.
        StorageError: the storage failed.
    """
    found = _named([look(url, clock) for url in urls])
    tags = {each.entry.tag[0] if each.entry.tag else None for each in found}
    tag = tags.pop() if len(tags) == 1 else None  # of different kinds, they say nothing together
    samples = contents.samples(found if tag is None else [])
    digests: Iterable[int | None] = contents.contents(found) if full else (None for _ in found)
    files = (
        ranges.of(File(each.name, each.entry.size, _tag(each.entry, tag), content))
        for each, content in zip(found, digests, strict=True)
    )
    exact, kept = bounded(list(files), most)
    return Files(len(found), sum(each.entry.size for each in found), tag, exact, tuple(kept), samples)


def _tag(entry: Entry, used: str | None) -> int | None:
    return short(entry.tag[1].strip('"').encode()) if entry.tag and used else None


def _named(places: Sequence[Place]) -> list[Found]:
    """All files in the order of their names, which are relative to the folder that all are in."""
    bases: dict[str, str] = {}
    for place in places:
        above = bases.get(place.store, place.root)
        bases[place.store] = posixpath.commonpath([above, place.root])
    found: dict[str, Found] = {}
    for place in places:
        base = bases[place.store]
        below = "" if place.root == base else posixpath.relpath(place.root, base or ".")
        prefix = f"{below}/" if below else ""
        prefix = prefix if len(bases) == 1 else place.store + prefix
        for entry in place.entries:
            name = _printable(prefix + entry.path)
            found[name] = Found(name, entry, place.reader)
    return [found[name] for name in sorted(found)]


def _printable(name: str) -> str:
    """A name that JSON can hold, also of a file whose name is not text."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def bounded(files: Sequence[Range], most: int) -> tuple[bool, list[Range]]:
    """Files as they are, or joined to so few ranges that these take at most ``most`` bytes of JSON.

    Returns:
        Whether each is still one file, and the files or ranges.
    """
    # Each level halves their number. Those that can't do are left out: a row has 40 bytes at least.
    lowest = max(0, (len(files) * 40 // most).bit_length() - 1)
    kept = ranges.summed(files, lowest) if lowest else list(files)
    while len(kept) > 1 and _json_bytes([_row(each) for each in kept]) > most:
        lowest += 1
        kept = ranges.summed(kept, lowest)
    return lowest == 0, kept


def _json_bytes(value: Any) -> int:
    return len(json.dumps(value))
