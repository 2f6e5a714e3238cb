"""The bytes of files: samples of them, or all."""

from __future__ import annotations

import heapq
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

import numpy as np

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.storage.threads import Threads
from hvdrecover.data.fingerprints.places import Entry, Read, Reader
from hvdrecover.data.fingerprints.sampling import short, spread
from hvdrecover.errors import StorageError

T = TypeVar("T")
U = TypeVar("U")

_MAX_SAMPLES = 16_000  # bytes of JSON for the samples
_BLOCK = 1 << 12  # bytes
_WHOLE = 1 << 16  # bytes; a file that is no larger is sampled as a whole


class Found(NamedTuple):
    """A file, by what name it goes, and what reads it."""

    name: str
    entry: Entry
    reader: Reader


def samples(found: Sequence[Found]) -> dict[str, str]:
    """Digests of blocks of the first file, the last one and some others."""
    if not found:
        return {}
    most = min(each.reader.samples for each in found)
    # By the digests of the names: a file that comes takes the place of one other at most.
    chosen = heapq.nsmallest(most - 2, found, key=lambda each: short(each.name.encode()))
    chosen = list({each.name: each for each in (found[0], found[-1], *chosen)}.values())
    room = _MAX_SAMPLES
    for number, each in enumerate(chosen):
        room -= len(json.dumps(each.name)) + 22
        if room < 0:
            del chosen[number:]
            break
    digests = _in_threads(_sample, chosen, _at_once(chosen))
    return dict(sorted(zip((each.name for each in chosen), digests, strict=True)))


def _sample(each: Found) -> str:
    digest = Digest()
    with each.reader.open(each.entry.path) as read:
        for start, end in blocks(each.entry.size):
            buffer = np.empty(end - start, np.uint8)
            digest.update(_filled(each, read, buffer, start))
    return digest.hex()[:16]


def blocks(size: int) -> list[tuple[int, int]]:
    """Return which bytes of a file are a sample of it: where each block begins and ends.

    A file of 1 GB has 32 blocks of 4 KiB, one of 1 TB 52.
    """
    if size <= _WHOLE:
        return [(0, size)] if size else []  # on a server it would cost as much as one that has something
    count = 2 * (1 + (size // _WHOLE).bit_length())
    return [
        (number * _BLOCK, min(size, (number + 1) * _BLOCK)) for number in spread(-(-size // _BLOCK), count)
    ]


def contents(found: Sequence[Found]) -> Iterator[int]:
    """The digest of each file's bytes, in order."""
    at_once = min(_at_once(found), len(found))
    return _in_threads(lambda each: _content(each, each.reader.buffer // at_once), found, at_once)


def _content(each: Found, room: int) -> int:
    digest, size = Digest(), each.entry.size
    buffer = np.empty(min(size, room), np.uint8)
    with each.reader.open(each.entry.path) as read:
        for start in range(0, size, room):
            digest.update(_filled(each, read, buffer[: size - start], start))
    return int(digest.hex(), 16)


def _filled(each: Found, read: Read, buffer: Bytes, start: int) -> Bytes:
    if read(buffer, start) < len(buffer):
        raise StorageError(
            each.name,
            "the file became shorter while it was read. Take the fingerprint when nobody writes to the data.",
        )
    return buffer


def _at_once(found: Sequence[Found]) -> int:
    return min(each.reader.at_once for each in found)


def _in_threads(function: Callable[[T], U], items: Iterable[T], at_once: int) -> Iterator[U]:
    """Yield a function's results for many items, in order, never far ahead of who takes them."""
    under_way: deque[Future[U]] = deque()
    with Threads(at_once, "hvdrecover-fingerprint") as threads:
        for item in items:
            under_way.append(threads.submit(function, item))
            if len(under_way) > 4 * at_once:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
