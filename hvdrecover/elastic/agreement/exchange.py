"""Exchanging values of any size among the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.elastic.interfaces import Buffer, World

Bytes = npt.NDArray[np.uint8]

_ALIGNMENT = 64  # bytes; of files, so that tensors can be made over them


def gather_json(world: World, value: Any, name: str) -> list[Any]:
    """Return each rank's value, by rank.

    Args:
        world: the ranks, all of which call this.
        value: this rank's, of what JSON can hold.
        name: of the collective.
    """
    return [json.loads(bytes(text)) for text in world.gather(encoded(value), name)]


def packed(value: Any, files: Sequence[Bytes]) -> bytes:
    """Return a value and files in one, each where its memory is aligned."""
    pieces = [encoded([value, [len(file) for file in files]]), *(file.tobytes() for file in files)]
    return b"".join(_padded(piece) for piece in (_length(pieces[0]), *pieces))


def unpacked(row: Buffer) -> tuple[Any, list[Bytes]]:
    """Return what was `packed`."""
    whole = np.frombuffer(bytearray(row), dtype=np.uint8)  # may be written to, as torch wants memory to be
    size = int.from_bytes(whole[:8].tobytes(), "little")
    value, lengths = json.loads(whole[_ALIGNMENT : _ALIGNMENT + size].tobytes())
    return value, list(_files(whole[_ALIGNMENT + _end(size) :], lengths))


def encoded(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(value).encode()


def _length(head: bytes) -> bytes:
    return len(head).to_bytes(8, "little")


def _padded(piece: bytes) -> bytes:
    return piece.ljust(_end(len(piece)), b"\0")


def _end(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _files(rest: Bytes, lengths: Sequence[int]) -> Iterator[Bytes]:
    for length in lengths:
        yield rest[:length]
        rest = rest[_end(length) :]
