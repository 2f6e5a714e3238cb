"""Fingerprints of arrays and tensors, which are looked at in place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hvdrecover.checkpoint.digest import Digest
from hvdrecover.data.fingerprints.elements import (
    array_bytes,
    dtype_name,
    element_digest,
    is_array,
    refuse_sparse,
    to_numpy,
)
from hvdrecover.data.fingerprints.sampling import spread
from hvdrecover.data.fingerprints.series import RANGES, SAMPLES, Series, fact
from hvdrecover.errors import ConfigError

MOST = 32  # arrays; more are taken for a data set, each for an element
_SAMPLES_IN_ALL = 3 * SAMPLES  # of all arrays together, so that they fit into a manifest
_RANGES_IN_ALL = 6 * RANGES
_PART = 1 << 16  # bytes; of what is larger, parts are looked at
_PARTS = 256  # how many, of an array with a single element
_FEWEST_PARTS = 4
_PIECE = 1 << 22  # bytes that are looked at at a time
_MAX_NAME = 100  # characters


def leaves(data: Any, name: str = "") -> dict[str, Any] | None:
    """Arrays, alone or nested in lists, tuples and dicts, by their paths; None if there is anything else."""
    if is_array(data):
        return {fact(name, _MAX_NAME): data}
    if isinstance(data, Mapping):
        items = [(f"{name}[{key!r}]", data[key]) for key in sorted(data, key=repr)]
    elif isinstance(data, list | tuple):
        items = [(f"{name}[{number}]", item) for number, item in enumerate(data)]
    else:
        return None
    found: dict[str, Any] = {}
    for path, item in items:
        below = leaves(item, path)
        if below is None:
            return None
        found |= below
    return found or None


def take(arrays: Mapping[str, Any], full: bool) -> dict[str, Series]:
    """The fingerprint of each of some arrays.

    Args:
        arrays: at most `MOST`, by name.
        full: whether to look at every byte.

    Raises:
        ConfigError: one holds Python objects, or can't be read.
    """
    samples = min(SAMPLES, _SAMPLES_IN_ALL // len(arrays))
    ranges = min(RANGES, _RANGES_IN_ALL // len(arrays)) if full else 0
    return {name: _Array(array, f"data{name}").series(samples, ranges) for name, array in arrays.items()}


class _Array:
    def __init__(self, data: Any, name: str) -> None:
        refuse_sparse(data, name)
        dtype = data.dtype
        if getattr(dtype, "hasobject", False):
            raise ConfigError(
                "data",
                f"{name} is an array of Python objects, which has no bytes to compare; pass an array of "
                "numbers or of fixed-length strings, or a list",
            )
        try:
            shape = tuple(int(size) for size in data.shape)
        except (TypeError, ValueError) as error:
            raise ConfigError("data", f"the shape of {name} is not known: {data.shape}") from error
        # A number is an array of one.
        self._data: Any = data if shape else to_numpy(data, name).reshape(1)
        self._shape: tuple[int, ...] = shape or (1,)
        self._name = name
        self._dtype = dtype_name(dtype)
        self._item = _item_bytes(data)

    def series(self, samples: int, ranges: int) -> Series:
        length, element = self._shape[0], self._shape[1:]
        numbers = spread(length, samples)
        parts = _PARTS // max(1, len(numbers))
        sampled = {number: self._sample(number, max(_FEWEST_PARTS, parts)) for number in numbers}
        described = fact(f"{self._dtype}{list(element)}")
        if not ranges:
            return Series(str(length), described, sampled)
        step = 1
        while step * ranges < length:
            step *= 2
        digests = [self._range(start, start + step) for start in range(0, length, step)]
        return Series(str(length), described, sampled, step, tuple(digests))

    def _sample(self, number: int, parts: int) -> str:
        # A slice, not an item: an item of a numpy array of numbers is a copy, and may be of another kind.
        shape = (1, *self._shape[1:])
        return self._digest(self._parts(self._data[number : number + 1], shape, parts))[:16]

    def _range(self, start: int, end: int) -> str:
        end = min(end, self._shape[0])
        return self._digest(self._pieces(self._data[start:end], (end - start, *self._shape[1:])))

    def _digest(self, arrays: Iterator[Any]) -> str:
        digest = Digest()
        for each in arrays:
            array = to_numpy(each, self._name)
            if array.dtype.hasobject:  # TensorFlow's strings
                digest.update(element_digest(array.tolist(), self._name).encode())
                continue
            for piece in array_bytes(array):
                digest.update(piece)
        return digest.hex()

    def _parts(self, data: Any, shape: tuple[int, ...], count: int) -> Iterator[Any]:
        """The whole of it, or about ``count`` parts if it is large."""
        if math.prod(shape) * self._item <= _PART:
            yield data
        elif len(shape) == 1:
            size = max(1, _PART // self._item)
            for part in spread(-(-shape[0] // size), count):
                yield data[part * size : (part + 1) * size]
        else:
            chosen = spread(shape[0], count)
            for number in chosen:
                yield from self._parts(data[number], shape[1:], max(_FEWEST_PARTS, count // len(chosen)))

    def _pieces(self, data: Any, shape: tuple[int, ...]) -> Iterator[Any]:
        """All of it, in order, and little at a time: what is not contiguous is copied."""
        row = math.prod(shape[1:]) * self._item
        if row > _PIECE and len(shape) > 1:
            for number in range(shape[0]):
                yield from self._pieces(data[number], shape[1:])
        else:
            step = max(1, _PIECE // max(1, row))
            for start in range(0, shape[0], step):
                yield data[start : start + step]


def _item_bytes(data: Any) -> int:
    """Bytes of an item, or a guess where that is not fixed, as for TensorFlow's strings."""
    known = getattr(data.dtype, "itemsize", None) or getattr(data.dtype, "size", None)
    return int(known or 64)
