"""The differences between two commits: tensors, plain objects, cursors and facts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import Arena, Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import catalog, readable
from hvdrecover.checkpoint.layout import ITEM_BYTES
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.root import read_manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.checkpoint.values import Json

CHUNK = 1 << 20  # elements that are compared at a time


@dataclass(frozen=True)
class Difference:
    """One difference between commit A and commit B.

    Attributes:
        name: a tensor with its attribute's name, such as ``model.layer.weight``, or the path of an object.
        change: ``added``, ``removed``, another dtype and shape, the number of elements that differ, or both
            values of an object.
        largest: for elements that differ, ``max|b - a|`` over those that are finite in both; else None.
    """

    name: str
    change: str
    largest: float | None = None


def compare(
    storage: Storage, a: CommitId, b: CommitId, advance: Callable[[int], None]
) -> tuple[list[Difference], int]:
    """Compare two commits and verify every byte. One file of each is in memory at a time.

    Args:
        storage: the root.
        a: the commit to compare with.
        b: the commit that is compared.
        advance: told how many more bytes have been compared, of both together.

    Returns:
        The differences, and the number of tensors that are equal.

    Raises:
        CorruptCheckpointError: one of them is damaged.
        FormatVersionError: one of them is of a newer format.
        StorageError: the storage failed.
    """
    manifests = [read_manifest(storage, commit) for commit in (a, b)]
    found: list[Difference] = []
    unchanged = 0
    for attribute in sorted({*manifests[0].by_attribute, *manifests[1].by_attribute}):
        read = [read_commit(storage, commit, {attribute}).arenas.get(attribute) for commit in (a, b)]
        differences, equal = _compare_tensors(attribute, *read)
        found += differences
        unchanged += equal
        advance(sum(arena.layout.nbytes for arena in read if arena))
        del read  # free the memory before the next files are read
    sides = [_objects(manifest, f"{storage.url}/{manifest.id.name}") for manifest in manifests]
    for path, texts in readable.differences(*sides).items():
        found.append(Difference(path, " → ".join("(none)" if text is None else text for text in texts)))
    return found, unchanged


def _objects(manifest: Manifest, url: str) -> dict[str, Json]:
    """Return everything that a manifest says about the training."""
    return {
        **catalog.attributes(manifest.state, url),
        **catalog.samplers(manifest.state, url),
        "(world size)": manifest.world_size,
        "(finished)": manifest.finished,
        "(random)": manifest.state.get("random"),
        "(versions)": dict(manifest.versions),
    }


def _compare_tensors(attribute: str, a: Arena | None, b: Arena | None) -> tuple[list[Difference], int]:
    before, after = (arena.layout.by_name if arena else {} for arena in (a, b))
    found, equal = [], 0
    for name in sorted({*before, *after}):
        shown = f"{attribute}.{name}"
        if name not in before:
            found.append(Difference(shown, f"added {after[name]}"))
        elif name not in after:
            found.append(Difference(shown, f"removed {before[name]}"))
        elif before[name] != after[name]:
            found.append(Difference(shown, f"{before[name]} → {after[name]}"))
        elif a and b:
            spec = before[name]
            changed, non_finite, largest = measure(spec.dtype, a.bytes_of(name), b.bytes_of(name))
            elements = f"{changed} of {spec.nbytes // ITEM_BYTES[spec.dtype]} elements"
            if changed:
                note = f", {non_finite} not finite" if non_finite else ""
                found.append(Difference(shown, elements + note, largest))
            else:
                equal += 1
    return found, equal


def measure(dtype: str, a: Bytes, b: Bytes) -> tuple[int, int, float]:
    """Compare two tensors of one dtype and shape, chunk by chunk.

    Integers are compared exactly, bfloat16 and float8 by value, complex numbers by modulus. Equal NaNs count
    as equal.

    Returns:
        The number of elements that differ, how many of these are NaN or infinite on one side, and the largest
        difference of the others.
    """
    changed, non_finite, largest = 0, 0, 0.0
    step = CHUNK * ITEM_BYTES[dtype]
    for start in range(0, len(a), step):
        x, y = (decode(side[start : start + step], dtype) for side in (a, b))
        if x.dtype.kind in "iu":
            # As uint64, which wraps around: so the difference of any two integers is exact.
            gap = np.maximum(x, y).astype(np.uint64) - np.minimum(x, y).astype(np.uint64)
            changed += int(np.count_nonzero(gap))
            largest = max(largest, int(gap.max()))
            continue
        wide = np.complex128 if x.dtype.kind == "c" else np.float64
        x, y = x.astype(wide), y.astype(wide)
        differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        changed += int(np.count_nonzero(differ))
        non_finite += int(np.count_nonzero(differ & ~finite))
        with np.errstate(over="ignore", invalid="ignore"):
            largest = max(largest, float(np.max(np.abs(y - x), initial=0.0, where=finite)))
    return changed, non_finite, largest


_NUMPY = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
}


def _e4m3() -> npt.NDArray[np.float32]:
    """The value of each byte: 1 sign bit, 4 bits of exponent (bias 7), 3 of fraction; no infinities.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.
    """
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 0xF, code & 0x7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3()


def decode(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """The numbers that bytes stand for.

    Args:
        data: a uint8 array; whole numbers of the dtype.
        dtype: a key of `hvdrecover.checkpoint.layout.ITEM_BYTES`.

    Returns:
        A flat array: of the dtype itself, where numpy has it, and a view of ``data``; of uint8 for booleans;
        of float32 for bfloat16 and float8, whose values it holds exactly.
    """
    if dtype == "BF16":  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[data]
    return data.view(_NUMPY[dtype])
