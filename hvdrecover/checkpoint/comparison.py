"""The content of commits as text, and the differences between two commits.

Plain objects are shown as Python would write them. Another user may have written the commit, so nothing is
imported, a malformed value is shown as JSON, and control characters are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
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
    """One difference between commit A and commit B."""

    name: str  # a tensor with its attribute, `model.layer.weight`, or the path of an object
    change: str
    largest: float | None = None  # max|b - a| over the elements that differ and are finite in both


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

    ``advance`` is called with the number of bytes that have been compared, of both together.
    """
    manifests = [read_manifest(storage, commit) for commit in (a, b)]
    found: list[Difference] = []
    unchanged = 0
    for attribute in sorted({*manifests[0].by_attribute, *manifests[1].by_attribute}):
        read = [read_commit(storage, commit, {attribute}).arenas.get(attribute) for commit in (a, b)]
        compared = _compare_tensors(attribute, *read)
        found += [each for each in compared if each]
        unchanged += compared.count(None)
        advance(sum(arena.layout.nbytes for arena in read if arena))
        del read  # free the memory before the next files are read
    for path, texts in differences(*map(_objects, manifests)).items():
        found.append(Difference(path, " → ".join(texts)))
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


def _compare_tensors(attribute: str, a: Arena | None, b: Arena | None) -> list[Difference | None]:
    """Return the difference of each tensor, None for those that are equal."""
    before, after = (arena.layout.by_name if arena else {} for arena in (a, b))
    found: list[Difference | None] = []
    for name in sorted({*before, *after}):
        shown, old, new = f"{attribute}.{name}", before.get(name), after.get(name)
        if old == new and old and a and b:
            changed, non_finite, largest = measure(old.dtype, a.bytes_of(name), b.bytes_of(name))
            note = f", {non_finite} not finite" if non_finite else ""
            elements = f"{changed} of {old.nbytes // ITEM_BYTES[old.dtype]} elements{note}"
            found.append(Difference(shown, elements, largest) if changed else None)
        elif old and new:
            found.append(Difference(shown, f"{old} → {new}"))
        else:
            found.append(Difference(shown, f"removed {old}" if old else f"added {new}"))
    return found


def measure(dtype: str, a: Bytes, b: Bytes) -> tuple[int, int, float]:
    """Compare two tensors of one dtype and shape, chunk by chunk.

    Returns the number of elements whose bits differ, how many of these are NaN or infinite on one side, and
    the largest difference of the others, by modulus of complex numbers.
    """
    changed, non_finite, largest = 0, 0, 0.0
    step = CHUNK * ITEM_BYTES[dtype]
    for start in range(0, len(a), step):
        x, y = different(dtype, a[start : start + step], b[start : start + step])
        finite = np.isfinite(x) & np.isfinite(y)
        changed += len(finite)
        non_finite += int(np.count_nonzero(~finite))
        with np.errstate(over="ignore", invalid="ignore"):
            largest = max(largest, float(np.max(np.abs(y - x), initial=0.0, where=finite)))
    return changed, non_finite, largest


def different(dtype: str, a: Bytes, b: Bytes) -> list[npt.NDArray[Any]]:
    """Return the elements of two tensors whose bits differ, as float64 or complex128."""
    rows = [each.reshape(-1, ITEM_BYTES[dtype]) for each in (a, b)]
    differ = (rows[0] != rows[1]).any(axis=1)
    wide = np.complex128 if dtype == "C64" else np.float64
    return [decode(each[differ].reshape(-1), dtype).astype(wide) for each in rows]


def decode(data: Bytes, dtype: str) -> npt.NDArray[Any]:
    """Return the numbers that bytes stand for, as a flat array: of float32 for types that numpy lacks."""
    if dtype == "BF16":  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":  # a float16 with a bias of 7 instead of 15, and NaNs as its largest numbers
        bits = data.astype(np.uint16)
        numbers = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).view(np.float16).astype(np.float32) * 256
        numbers[(data & 0x7F) == 0x7F] = np.nan
        return numbers
    kind = "u" if dtype == "BOOL" else dtype[0].lower()
    return data.view(f"<{kind}{ITEM_BYTES[dtype]}")


# -- plain objects -------------------------------------------------------------------------------------


def text(value: Json) -> str:
    """Return an encoded value, or any JSON, as Python would write it, on one line.

    It is shown as JSON if it is malformed, or holds tensors or a class that this program has not imported.
    """
    if only_tensors(value):
        count = sum(map(_is_tensor, _leaves(value).values()))
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
    leaves = [leaf for leaf in _leaves(value).values() if leaf not in ([], {})]
    return bool(leaves) and all(map(_is_tensor, leaves))


def holds_tensors(value: Json) -> bool:
    """Return whether there is a tensor anywhere in a value."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict) and _TENSOR in item:
            return True
        waiting += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    return False


def differences(a: Json, b: Json) -> dict[str, tuple[str, str]]:
    """Return where two values differ, apart from tensors: path to both texts."""
    before, after = _leaves(a), _leaves(b)
    found = {}
    for path in {**before, **after}:
        sides = [side[path] for side in (before, after) if path in side]
        if all(map(_is_tensor, sides)) or (len(sides) == 2 and repr(sides[0]) == repr(sides[1])):
            continue
        texts = [shortened(side[path]) if path in side else "(none)" for side in (before, after)]
        found["".join(path).lstrip(".")] = (texts[0], texts[1])
    return found


def _leaves(value: Json, path: tuple[str, ...] = (), depth: int = 0) -> dict[tuple[str, ...], Json]:
    """Return the values without items inside containers, by the steps of their paths."""
    items: Iterable[tuple[str, Json]] = ()
    pairs = value.get("$dict") if isinstance(value, dict) else None
    if isinstance(value, list):
        items = ((f"[{number}]", item) for number, item in enumerate(value))
    elif isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        items = ((f"[{shortened(key)}]", item) for key, item in pairs)
    elif isinstance(value, dict) and not next(iter(value), "").startswith("$"):
        items = ((f".{printable(key)}", item) for key, item in value.items())
    found: dict[tuple[str, ...], Json] = {}
    for step, item in items if depth < _DEPTH else ():
        found |= _leaves(item, (*path, step), depth + 1)
    return found or {path: value}


def _is_tensor(value: Json) -> bool:
    return isinstance(value, dict) and list(value) == [_TENSOR]
