"""The content of commits as text, and the differences between two commits.

Plain objects are shown as Python would write them. Another user may have written the commit, so nothing is
imported, a malformed value is shown as JSON, and control characters are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint import values
from hvdrecover.checkpoint.arena import Arena, Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import ITEM_BYTES
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.root import read_manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.checkpoint.values import Json
from hvdrecover.redaction import printable

CHUNK = 1 << 20  # elements that are compared at a time
_TENSOR = "$tensor"
_DEPTH = 120  # containers; `values.encode` goes no deeper than 100


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


@dataclass(frozen=True)
class Comparison:
    """The differences between two commits of a root, and the number of tensors that are equal."""

    root: str
    a: str
    b: str
    differences: list[Difference]
    unchanged: int


def compare(storage: Storage, a: CommitId, b: CommitId, advance: Callable[[int], None]) -> Comparison:
    """Compare two commits and verify every byte. One file of each is in memory at a time.

    Args:
        advance: told how many more bytes have been compared, of both together.

    Raises:
        CorruptCheckpointError: one of them is damaged.
        FormatVersionError: one of them is of a newer format.
    """
    manifests = [read_manifest(storage, commit) for commit in (a, b)]
    found: list[Difference] = []
    unchanged = 0
    for attribute in sorted({*manifests[0].by_attribute, *manifests[1].by_attribute}):
        read = [read_commit(storage, commit, {attribute}).arenas.get(attribute) for commit in (a, b)]
        differing, equal = _compare_tensors(attribute, *read)
        found += differing
        unchanged += equal
        advance(sum(arena.layout.nbytes for arena in read if arena))
        del read  # free the memory before the next files are read
    for path, texts in differences(*map(_objects, manifests)).items():
        found.append(Difference(path, " → ".join("(none)" if text is None else text for text in texts)))
    return Comparison(storage.url, a.name, b.name, found, unchanged)


def _objects(manifest: Manifest) -> dict[str, Json]:
    """Return everything that a manifest says about the training."""
    return {
        **manifest.attributes,
        **manifest.samplers,
        "(world size)": manifest.world_size,
        "(finished)": manifest.finished,
        "(random)": manifest.state.get("random"),
        "(versions)": dict(manifest.versions),
    }


# -- tensors -------------------------------------------------------------------------------------------


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
    kind = "u" if dtype == "BOOL" else dtype[0].lower()
    return data.view(f"<{kind}{ITEM_BYTES[dtype]}")


# -- plain objects -------------------------------------------------------------------------------------


def text(value: Json) -> str:
    """Return an encoded value, or any JSON, as Python would write it, on one line.

    It is shown as JSON if it is malformed, or holds tensors or a class that this program has not imported.
    """
    if count := _count_tensors(value, 0):
        return "<tensor>" if count == 1 else f"<{count} tensors>"
    try:
        made = values.decode(value)
    except ValueError:
        made = value
    return printable(re.sub(r"\n\s*", " ", repr(made)))


def shortened(value: Json, limit: int = 60) -> str:
    """Return a value on one line of at most ``limit`` characters."""
    line = text(value)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def only_tensors(value: Json) -> bool:
    """Return whether a value is a tensor, or containers that hold only tensors."""
    return bool(_count_tensors(value, 0))


def holds_tensors(value: Json) -> bool:
    """Return whether there is a tensor anywhere in a value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if _TENSOR in item:
                return True
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return False


def _count_tensors(value: Json, depth: int) -> int | None:
    """Return how many tensors containers hold; None if they hold anything else too."""
    if isinstance(value, dict) and list(value) == [_TENSOR]:
        return 1
    items = _items(value) if depth < _DEPTH else None
    if items is None:
        return None
    counts = [_count_tensors(item, depth + 1) for item in items.values()]
    return None if None in counts else sum(filter(None, counts))


def differences(a: Json, b: Json) -> dict[str, tuple[str | None, str | None]]:
    """Return where two values differ, apart from tensors: path to both texts, None for a missing value."""
    return {path.lstrip("."): texts for path, texts in _differences(a, b, "", 0)}


def _differences(
    a: Json, b: Json, path: str, depth: int
) -> Iterator[tuple[str, tuple[str | None, str | None]]]:
    before, after = _items(a), _items(b)
    if depth == _DEPTH or before is None or after is None:
        if a != b or type(a) is not type(b):
            yield path, (shortened(a), shortened(b))
        return
    for step in {**before, **after}:
        if step in before and step in after:
            yield from _differences(before[step], after[step], path + step, depth + 1)
        elif not only_tensors({**before, **after}[step]):
            texts = [shortened(side[step]) if step in side else None for side in (before, after)]
            yield path + step, (texts[0], texts[1])


def _items(value: Json) -> dict[str, Json] | None:
    """Return the items of a list or a dict by their step of the path; None for values without items."""
    if isinstance(value, list):
        return {f"[{number}]": item for number, item in enumerate(value)}
    if not isinstance(value, dict):
        return None
    if not next(iter(value), "").startswith("$"):
        return {f".{printable(key)}": item for key, item in value.items()}
    pairs = value.get("$dict")
    if isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        return {f"[{shortened(key)}]": item for key, item in pairs}
    return None
