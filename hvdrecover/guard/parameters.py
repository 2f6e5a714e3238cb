"""Comparison of parameters and optimizer slots across the ranks.

The ranks compare a commit in memory: it lies there as bytes, and stands still. They compare one digest first.
If it differs, they compare a digest of each tensor, and then the tensors that differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdrecover.checkpoint.arena import Bytes, allocate, digest_numbers
from hvdrecover.checkpoint.comparison import decode
from hvdrecover.checkpoint.layout import ITEM_BYTES, TensorSpec
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.state.adapter import World

PIECE = 1 << 26
"""Bytes in one broadcast; a multiple of every dtype's size."""

Names = Mapping[str, Collection[str]]
"""Names of tensors, by attribute."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a commit."""

    name: str  # with its attribute's, such as model.0.weight
    spec: TensorSpec
    data: Bytes  # writable


@dataclass(frozen=True)
class Difference:
    """A tensor of one rank that differs from the majority's."""

    tensor: str  # name of the tensor
    kind: str  # dtype and shape of the tensor
    rank: int
    host: str
    count: int  # how many numbers differ
    total: int
    largest: float  # absolute difference; infinite or NaN where a number is

    def __str__(self) -> str:
        numbers = f"{self.count} of {self.total} numbers, by {self.largest:.3g} at most"
        return f"{self.tensor}, {self.kind}: {numbers}, on rank {self.rank} on {self.host}"


def tensors_of(snapshot: Snapshot, shared: Names) -> list[Tensor]:
    """The tensors of a commit that all ranks must hold alike, in an order that is the same on all of them."""
    return [
        Tensor(f"{name}.{spec.name}", spec, arena.bytes_of(spec.name))
        for name, arena in snapshot.arenas.items()
        for spec in arena.layout.specs
        if spec.name in shared.get(name, ())
    ]


def ballot(tensors: Sequence[Tensor]) -> list[int]:
    """Return a rank's ballot: the digest of its tensors as two numbers, and how many tensors there are."""
    return [*digest_numbers(*(each.data for each in tensors)), len(tensors)]


def compare(world: World, tensors: Sequence[Tensor], root: int, host: str, *, heal: bool) -> list[Difference]:
    """Find the tensors of this rank that differ from the root's; ``heal`` replaces their bytes.

    All ranks call this, with tensors of the same names, dtypes and shapes. The root is one of the majority.
    """
    mine = [half for tensor in tensors for half in digest_numbers(tensor.data)]
    table = world.allgather(mine, "hvdrecover.guard.tensors").reshape(world.size(), -1, 2)
    differs = (table != table[root]).any(axis=2)
    found = []
    for place in differs.any(axis=0).nonzero()[0].tolist():
        tensor, here = tensors[place], bool(differs[world.rank(), place])
        count, largest = _measure(world, tensor, root, heal=heal and here)
        if here:
            total = math.prod(tensor.spec.shape)
            facts = (world.rank(), host, count, total, largest)
            found.append(Difference(tensor.name, str(tensor.spec), *facts))
    return found


def _measure(world: World, tensor: Tensor, root: int, *, heal: bool) -> tuple[int, float]:
    """Return how far this rank's tensor is from the root's. Pieces keep the root's copy small."""
    count, largest = 0, 0.0
    scratch = allocate(min(PIECE, tensor.spec.nbytes))
    for start in range(0, tensor.spec.nbytes, PIECE):
        piece = tensor.data[start : start + PIECE]
        roots = scratch[: len(piece)]
        if world.rank() == root:
            roots[:] = piece
        world.broadcast(roots, root, f"hvdrecover.guard.{tensor.spec.nbytes}.{start}")
        different, by = apart(piece, roots, tensor.spec.dtype)
        count, largest = count + different, float(np.maximum(largest, by))  # NaN if either is
        if heal:
            piece[:] = roots
    return count, largest


def apart(mine: Bytes, others: Bytes, dtype: str) -> tuple[int, float]:
    """Return how many numbers differ in their bits, and the largest absolute difference."""
    rows = [each.reshape(-1, ITEM_BYTES[dtype]) for each in (mine, others)]
    places = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    if not len(places):
        return 0, 0.0
    wide = np.complex128 if dtype == "C64" else np.float64
    pair = [decode(each[places].reshape(-1), dtype).astype(wide) for each in rows]
    with np.errstate(all="ignore"):
        return len(places), float(np.abs(pair[0] - pair[1]).max())
