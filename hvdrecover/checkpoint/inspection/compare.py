"""The differences between two commits.

The *relative change* of a tensor from A to B is ``max|b - a| / max|a|``, each maximum taken over the elements
that are finite in both. Elements that are NaN or infinite in A or B, and not the same in both, are counted
apart. Integers are compared exactly, bfloat16 and float8 by the value, complex numbers by the modulus.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdrecover.checkpoint.arena import Arena, Bytes
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import contents, decoding, readable
from hvdrecover.checkpoint.inspection.decoding import Numbers
from hvdrecover.checkpoint.layout import ITEM_BYTES, TensorSpec
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.root import read_manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.checkpoint.values import Json

CHUNK = 1 << 20  # elements that are compared at a time


@dataclass(frozen=True)
class Change:
    """The difference between two tensors of one dtype and shape.

    Attributes:
        tensor: its name, with the attribute's: ``model.layer.weight``.
        spec: its dtype and shape.
        changed: how many elements differ in value.
        non_finite: how many of these are NaN or infinite in A or B.
        largest: ``max|b - a|`` over the elements that are finite in both.
        scale: ``max|a|`` over the same.
    """

    tensor: str
    spec: TensorSpec
    changed: int
    non_finite: int
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """``largest / scale``: 0 where nothing finite has changed, infinite where A was all zeros."""
        if self.largest == 0:
            return 0.0
        return self.largest / self.scale if self.scale else math.inf


@dataclass(frozen=True)
class Difference:
    """The differences between commit A and commit B.

    Attributes:
        added: tensors of B that A lacks; name to dtype and shape.
        removed: tensors of A that B lacks.
        reshaped: tensors of another dtype or shape; name to that in A and that in B.
        changes: tensors of which elements differ: those with non-finite ones first, then by relative change.
        unchanged: tensors that are equal.
        objects: plain objects, cursors and facts that differ: path to the text of the value in A and in B, or
            None where there is none.
    """

    added: dict[str, TensorSpec] = field(default_factory=dict)
    removed: dict[str, TensorSpec] = field(default_factory=dict)
    reshaped: dict[str, tuple[TensorSpec, TensorSpec]] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    objects: dict[str, tuple[str | None, str | None]] = field(default_factory=dict)


def compare(storage: Storage, a: CommitId, b: CommitId, advance: Callable[[int], None]) -> Difference:
    """Compare two commits; every byte is verified on the way.

    One file of each is in memory at a time, and little else.

    Args:
        storage: the root.
        a: the commit to compare with.
        b: the commit that is compared.
        advance: told how many more bytes have been compared, of both together.

    Raises:
        CorruptCheckpointError: one of them is damaged.
        FormatVersionError: one of them is of a newer format.
        StorageError: the storage failed.
    """
    manifests = [read_manifest(storage, commit) for commit in (a, b)]
    difference = Difference(objects=_objects(storage, manifests))
    sizes = [_sizes(manifest) for manifest in manifests]
    for attribute in sorted({*sizes[0], *sizes[1]}):
        read = [read_commit(storage, commit, {attribute}).arenas for commit in (a, b)]
        _compare_tensors(attribute, read[0].get(attribute), read[1].get(attribute), difference)
        del read  # free the memory before the next files are read
        advance(sum(size.get(attribute, 0) for size in sizes))
    difference.changes.sort(key=lambda change: (-change.non_finite, -change.relative, change.tensor))
    return difference


def _sizes(manifest: Manifest) -> dict[str, int]:
    return {attribute: entry.size for attribute, entry in manifest.by_attribute.items()}


def _objects(storage: Storage, manifests: Sequence[Manifest]) -> dict[str, tuple[str | None, str | None]]:
    """Return what differs in all that manifests say about the training."""
    sides: list[dict[str, Json]] = []
    for manifest in manifests:
        url = f"{storage.url}/{manifest.id.name}"
        facts = {
            "(world size)": manifest.world_size,
            "(finished)": manifest.finished,
            "(random)": manifest.state.get("random"),
            "(versions)": dict(manifest.versions),
        }
        sides.append(
            {**contents.attributes(manifest.state, url), **contents.samplers(manifest.state, url), **facts}
        )
    return readable.differences(*sides)


def _compare_tensors(attribute: str, a: Arena | None, b: Arena | None, difference: Difference) -> None:
    before, after = (arena.layout.by_name if arena else {} for arena in (a, b))
    for name in sorted({*before, *after}):
        shown = f"{attribute}.{name}"
        if name not in before:
            difference.added[shown] = after[name]
        elif name not in after:
            difference.removed[shown] = before[name]
        elif before[name] != after[name]:
            difference.reshaped[shown] = before[name], after[name]
        elif a and b:
            change = measure(shown, before[name], a.bytes_of(name), b.bytes_of(name))
            if change.changed:
                difference.changes.append(change)
            else:
                difference.unchanged.append(shown)


def measure(name: str, spec: TensorSpec, a: Bytes, b: Bytes) -> Change:
    """Compare two tensors of one dtype and shape, chunk by chunk.

    Args:
        name: what to call it.
        spec: dtype and shape of both.
        a: the bytes of the one.
        b: the bytes of the other.
    """
    changed, non_finite, largest, scale = 0, 0, 0.0, 0.0
    step = CHUNK * ITEM_BYTES[spec.dtype]
    for start in range(0, spec.nbytes, step):
        x, y = (decoding.decode(side[start : start + step], spec.dtype) for side in (a, b))
        measured = _measure_integers(x, y) if x.dtype.kind in "iu" else _measure_floats(x, y)
        changed += measured[0]
        non_finite += measured[1]
        largest, scale = max(largest, measured[2]), max(scale, measured[3])
    return Change(name, spec, changed, non_finite, largest, scale)


def _measure_integers(a: Numbers, b: Numbers) -> tuple[int, int, int, int]:
    # As uint64, which wraps around: so the difference of any two is exact, and so is the modulus of -2**63.
    gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
    unsigned = a.astype(np.uint64)
    modulus = np.where(a < 0, np.uint64(0) - unsigned, unsigned)
    return int(np.count_nonzero(gap)), 0, int(gap.max()), int(modulus.max())


def _measure_floats(a: Numbers, b: Numbers) -> tuple[int, int, float, float]:
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    differ = (a != b) & ~(np.isnan(a) & np.isnan(b))
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(over="ignore", invalid="ignore"):
        gap, modulus = np.abs(b - a), np.abs(a)
    return (
        int(np.count_nonzero(differ)),
        int(np.count_nonzero(differ & ~finite)),
        float(np.max(gap, initial=0.0, where=finite)),
        float(np.max(modulus, initial=0.0, where=finite)),
    )
