"""Comparison of parameters and optimizer slots across the ranks.

What is compared is a commit in memory: it lies there as bytes, and stands still. One digest tells whether
ranks agree, one for each tensor tells which differ, and the tensors themselves tell by how much.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.checkpoint.arena import Bytes, allocate
from hvdrecover.checkpoint.digest import Digest, digest_numbers
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.guard.distance import apart
from hvdrecover.elastic.interfaces import World

PIECE = 1 << 26
"""Bytes in one broadcast; a multiple of every dtype's size."""
_LISTED = 10  # differences in a message; events have more

Shared = Mapping[str, Collection[str]]
"""Names of the tensors that all ranks must hold alike, by attribute."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a commit.

    Attributes:
        name: with its attribute's, such as ``model.0.weight``.
        spec: its dtype and shape.
        data: its bytes; uint8 of shape ``[spec.nbytes]``, writable.
    """

    name: str
    spec: TensorSpec
    data: Bytes


@dataclass(frozen=True)
class Difference:
    """A tensor that is not what the majority holds, on one rank.

    Attributes:
        tensor: its name.
        kind: its dtype and shape.
        rank: the rank.
        host: the rank's host.
        count: how many numbers differ.
        total: of how many.
        largest: by how much at most.
    """

    tensor: str
    kind: str
    rank: int
    host: str
    count: int
    total: int
    largest: float

    def __str__(self) -> str:
        numbers = f"{self.count} of {self.total} numbers, by {self.largest:.3g} at most"
        return f"{self.tensor}, {self.kind}: {numbers}, on rank {self.rank} on {self.host}"


def listed(differences: Sequence[Difference]) -> list[str]:
    """Return a line for each difference, the first ones only."""
    lines = [str(each) for each in differences[:_LISTED]]
    hidden = len(differences) - _LISTED
    return [*lines, f"and {hidden} more"] if hidden > 0 else lines


def tensors_of(snapshot: Snapshot, shared: Shared) -> list[Tensor]:
    """The tensors of a commit that all ranks must hold alike, in an order that is the same on all of them."""
    return [
        Tensor(f"{name}.{spec.name}", spec, arena.bytes_of(spec.name))
        for name, arena in snapshot.arenas.items()
        for spec in arena.layout.specs
        if spec.name in shared.get(name, ())
    ]


def ballot(snapshot: Snapshot, shared: Shared) -> list[int]:
    """Return a rank's ballot: 16 bytes of digest as two numbers, and how many tensors they stand for."""
    digest = Digest()
    count = 0
    for name, arena in snapshot.arenas.items():
        wanted = shared.get(name, ())
        for start, stop, held in _runs(arena.layout.specs, arena.layout.offsets, wanted):
            digest.update(arena.buffer[start:stop])
            count += held
    return [*digest.numbers(), count]


def _runs(
    specs: Sequence[TensorSpec], offsets: Mapping[str, int], wanted: Collection[str]
) -> Iterator[tuple[int, int, int]]:
    """The bytes of the wanted tensors, from where to where and of how many: neighbours together."""
    start = stop = held = 0
    for spec in specs:
        if spec.name not in wanted:
            continue
        offset = offsets[spec.name]
        if offset != stop and held:
            yield start, stop, held
            held = 0
        start = start if held else offset
        stop, held = offset + spec.nbytes, held + 1
    if held:
        yield start, stop, held


def compare(world: World, tensors: Sequence[Tensor], root: int, host: str, *, heal: bool) -> list[Difference]:
    """See which tensors of this rank are not the root's, all ranks together.

    Args:
        world: the ranks, all of whom hold tensors of the same names, dtypes and shapes.
        tensors: this rank's.
        root: a rank that is right.
        host: this rank's host.
        heal: whether to put the root's bytes in the place of this rank's.

    Returns:
        This rank's differences.
    """
    mine = [half for tensor in tensors for half in digest_numbers(tensor.data)]
    table = world.allgather(mine, "hvdrecover.guard.tensors").reshape(world.size(), -1, 2)
    differs = (table != table[root]).any(axis=2)
    found = []
    for place in differs.any(axis=0).nonzero()[0].tolist():
        tensor = tensors[place]
        count, largest = _measure(world, tensor, root, heal=heal and bool(differs[world.rank(), place]))
        if differs[world.rank(), place]:
            total = math.prod(tensor.spec.shape)
            facts = (world.rank(), host, count, total, largest)
            found.append(Difference(tensor.name, str(tensor.spec), *facts))
    return found


def _measure(world: World, tensor: Tensor, root: int, *, heal: bool) -> tuple[int, float]:
    """Return how far this rank's tensor is from the root's, piece by piece."""
    count, largest = 0, 0.0
    scratch = allocate(min(PIECE, tensor.spec.nbytes))
    for start in range(0, tensor.spec.nbytes, PIECE):
        piece = tensor.data[start : start + PIECE]
        roots = scratch[: len(piece)]
        if world.rank() == root:
            roots[:] = piece
        world.broadcast(roots, root, f"hvdrecover.guard.{tensor.spec.nbytes}.{start}")
        different, by = apart(piece, roots, tensor.spec.dtype)
        count += different
        largest = by if math.isnan(by) else max(largest, by)
        if heal:
            piece[:] = roots
    return count, largest
