"""A summary of a list of files that is too long to be kept: ranges of its names, in order.

Which names begin a range is decided by the names' own digests, as in content-defined chunking
(https://en.wikipedia.org/wiki/Rolling_hash): a file that comes or goes moves no other boundary. And digests
of a range are sums of those of its files, so neighbouring ranges can be joined, and two lists be compared by
the boundaries that both have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from hvdrecover.checkpoint.digest import digest
from hvdrecover.data.fingerprints.sampling import SHORT_BITS, short

CONTENT_BITS = 128


class File(NamedTuple):
    """One file.

    Attributes:
        name: relative, with ``/``.
        size: in bytes.
        tag: digest of the store's own tag, or None.
        content: digest of all its bytes, or None.
    """

    name: str
    size: int
    tag: int | None
    content: int | None


@dataclass(frozen=True)
class Range:
    """Files whose names follow one another.

    Attributes:
        first: the first one's name.
        count: how many there are.
        nbytes: bytes of all of them.
        listing: digest of names and sizes.
        tags: digest of names and the store's tags, or None.
        content: digest of names and contents, or None.
    """

    first: str
    count: int
    nbytes: int
    listing: int
    tags: int | None
    content: int | None


def of(file: File) -> Range:
    """The range of one file."""

    # Each with the name: two files that change places must not leave the sums as they were.
    listing = short(f"{file.name}\0{file.size}".encode())
    tag = None if file.tag is None else short(f"{file.name}\0{file.tag}".encode())
    content = None if file.content is None else int(digest(f"{file.name}\0{file.content}".encode()), 16)
    return Range(file.name, 1, file.size, listing, tag, content)


def level(name: str) -> int:
    """Return a name's level as a boundary: half of all names are of level 0, a quarter of level 1, …"""
    number = short(name.encode())
    return (number & -number).bit_length() - 1 if number else SHORT_BITS


def summed(files: Iterable[Range], lowest: int) -> list[Range]:
    """Join ranges to some that begin at names of a level, or a higher one, and at the very first name."""
    return list(_joined((each, level(each.first) >= lowest) for each in files))


def at_boundaries(ranges: Sequence[Range], boundaries: Set[str]) -> list[Range]:
    """Join ranges to some that begin at given names, and at the very first one."""
    return list(_joined((each, each.first in boundaries) for each in ranges))


def _joined(ranges: Iterable[tuple[Range, bool]]) -> Iterator[Range]:
    under_way: list[Range] = []
    for each, begins in ranges:
        if begins and under_way:
            yield _join(under_way)
            under_way = []
        under_way.append(each)
    if under_way:
        yield _join(under_way)


def _join(ranges: Sequence[Range]) -> Range:
    return Range(
        ranges[0].first,
        sum(each.count for each in ranges),
        sum(each.nbytes for each in ranges),
        sum(each.listing for each in ranges) % 2**SHORT_BITS,
        _sum([each.tags for each in ranges], SHORT_BITS),
        _sum([each.content for each in ranges], CONTENT_BITS),
    )


def _sum(digests: Sequence[int | None], bits: int) -> int | None:
    """The sum of digests, or None if one is not known."""
    known = [each for each in digests if each is not None]
    return sum(known) % 2**bits if len(known) == len(digests) else None


def common(a: Sequence[Range], b: Sequence[Range]) -> list[tuple[Range, Range]]:
    """Two lists of ranges, joined to those between the boundaries that both have.

    Both lists must have something in them. The first ranges go together, whatever they begin with.
    """
    boundaries = {each.first for each in a[1:]} & {each.first for each in b[1:]}
    return list(zip(at_boundaries(a, boundaries), at_boundaries(b, boundaries), strict=True))
