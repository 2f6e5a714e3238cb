"""The safetensors format: which tensor lies where in a file.

A file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes without gaps.
Format: https://github.com/huggingface/safetensors#format. The header is padded with spaces, as the format
allows, so that the bytes begin on a page: a file can then be handed to the disk as it lies in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

PAGE = 4096
MAX_HEADER = 100_000_000  # the limit that safetensors' own reader sets
_MAX_DIMENSIONS = 64  # numpy's and torch's limit

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (a key of `ITEM_BYTES`) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True)
class Layout:
    """The place of each tensor in a file: the tensors in the order of their bytes, after the header."""

    specs: tuple[TensorSpec, ...]
    header: bytes

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Each tensor's first byte, counted from the start of the file."""
        offsets, position = {}, len(self.header)
        for spec in self.specs:
            offsets[spec.name] = position
            position += spec.nbytes
        return offsets

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        return {spec.name: spec for spec in self.specs}

    @cached_property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.specs)


def plan(specs: Sequence[TensorSpec]) -> Layout:
    """Lay tensors out: widest dtypes first, so that each is aligned; otherwise in the given order."""
    if len({"__metadata__", *(spec.name for spec in specs)}) != len(specs) + 1:
        raise ValueError("tensors need names of their own, other than '__metadata__'")
    ordered = tuple(sorted(specs, key=lambda spec: -ITEM_BYTES[spec.dtype]))
    entries: dict[str, Any] = {}
    position = 0
    for spec in ordered:
        end = position + spec.nbytes
        entries[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = text + b" " * (-(8 + len(text)) % PAGE)
    if len(padded) > MAX_HEADER:
        raise ValueError(f"the names of {len(specs)} tensors take more than {MAX_HEADER} bytes")
    return Layout(ordered, len(padded).to_bytes(8, "little") + padded)


def header_size(prefix: bytes, file_size: int) -> int:
    """Return the number of bytes before the tensors, from a file's first 8 bytes."""
    if len(prefix) < 8:
        raise ValueError("the file is shorter than a safetensors header")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER or 8 + length > file_size:
        raise ValueError(f"the header claims {length} bytes in a file of {file_size}")
    return 8 + length


def parse(header: bytes, file_size: int) -> Layout:
    """Read a header, the file's bytes up to the first tensor; its tensors must fill the rest exactly."""
    try:
        entries = json.loads(header[8:].decode())  # or it would guess at other encodings
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    entries.pop("__metadata__", None)
    found = [_entry(name, entry) for name, entry in entries.items()]
    found.sort(key=lambda item: (item[1], item[2]))
    position = 0
    for spec, start, end in found:
        if start != position or end - start != spec.nbytes:
            raise ValueError(f"tensor '{spec.name}' does not lie where the one before it ends")
        if (len(header) + start) % ITEM_BYTES[spec.dtype]:
            raise ValueError(f"tensor '{spec.name}' is not aligned, so no array can be made of its bytes")
        position = end
    if len(header) + position != file_size:
        raise ValueError(f"the tensors end at byte {len(header) + position} of {file_size}")
    return Layout(tuple(spec for spec, _, _ in found), header)


def _entry(name: str, entry: Any) -> tuple[TensorSpec, int, int]:
    """Return a tensor of a header, its first byte and its end, both counted from the header's end."""
    if not isinstance(entry, dict):
        raise ValueError(f"tensor '{name}' is not a JSON object")
    facts: list[Any] = [entry.get(key) for key in ("dtype", "shape", "data_offsets")]
    dtype, shape, offsets = facts
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor '{name}' has the unknown dtype {dtype!r}")
    for counts in (shape, offsets):
        if not isinstance(counts, list) or not all(
            type(each) is int and 0 <= each < 2**63 for each in counts
        ):
            raise ValueError(f"tensor '{name}' has a shape or offsets that are not lists of counts")
    if len(shape) > _MAX_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"tensor '{name}' has too many dimensions, or not two offsets")
    return TensorSpec(name, dtype, tuple(shape)), *offsets
