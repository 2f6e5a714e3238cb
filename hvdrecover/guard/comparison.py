"""Comparison of the ranks: their structure, their parameters and optimizer slots, and majority votes.

Structure: each rank describes its state and its script, and sends a digest of the description at each
rendezvous. Only if the digests differ are the descriptions themselves compared.

Parameters: the ranks compare a commit in memory: it lies there as bytes, and stands still. They compare one
digest first. If it differs, they compare a digest of each tensor, and then the tensors that differ.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hvdrecover.checkpoint.arena import Bytes, TensorSpec, allocate, digest, digest_numbers
from hvdrecover.checkpoint.inspection import different
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.guard.settings import Guard
from hvdrecover.state.adapter import Entry, Framework, World
from hvdrecover.state.contents import Contents
from hvdrecover.version import __version__

PIECE = 1 << 26
"""Bytes in one broadcast; a multiple of every dtype's size."""

# -- structure -----------------------------------------------------------------------------------------------

Description = tuple[Entry, ...]


def describe(guard: Guard, framework: Framework, contents: Contents) -> Description:
    """Describe a state's guard and attributes, the versions at work and the training script."""
    versions = {**framework.versions(), "hvdrecover": __version__}
    entries = [Entry(f"version of {name}", version) for name, version in versions.items()]
    entries += [Entry("training script", _script()), Entry("guard", str(guard))]
    if guard.data is not None:
        entries.append(Entry("training data", digest(json.dumps(guard.data.as_json()).encode())))
    for name, value in contents.values.items():
        if name in contents.orders:
            facts = {**contents.orders[name].counts_in(), "tail": contents.orders[name].tail}
            entries += [Entry(f"{name}.{fact}", str(each)) for fact, each in facts.items()]
        elif framework.is_component(value):
            entries += [replace(each, name=f"{name}{each.name}") for each in framework.describe(value)]
        else:
            entries.append(Entry(name, f"a {type(value).__name__}"))
    return tuple(entries)


def _script() -> str:
    """The script's file name and digest; a program that is typed in has none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return f"{Path(file).name}, {digest(Path(file).read_bytes())}" if file else "none"
    except OSError:
        return "none"


def digest_of(description: Description) -> tuple[int, int]:
    return digest_numbers("\0".join(f"{each.name}\0{each.value}" for each in description).encode())


def differences(descriptions: Sequence[Description | None], *, settings: bool) -> list[str]:
    """Return the differences between the ranks: a line each, the first ones only.

    A rank without a guard has no description. ``settings`` compares hyper-parameters as well.
    """
    unguarded = [rank for rank, each in enumerate(descriptions) if each is None]
    if unguarded:
        return [f"guard: none on {named(unguarded)}"] if len(unguarded) < len(descriptions) else []
    tables = [
        {entry.name: entry.value for entry in each or () if settings or not entry.setting}
        for each in descriptions
    ]
    lines = [
        f"{name}: {by_value([table.get(name, 'missing') for table in tables])}"
        for name in dict.fromkeys(name for table in tables for name in table)
        if len({table.get(name) for table in tables}) > 1
    ]
    if not lines and len({tuple(table) for table in tables}) > 1:
        lines = ["the same parameters, in another order"]
    return first_lines(lines)


# -- parameters ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """A tensor of a commit."""

    name: str  # with its attribute's, such as model.0.weight
    spec: TensorSpec
    data: Bytes  # writable


def shared_tensors(snapshot: Snapshot, rank_local: Mapping[str, Collection[str]]) -> list[Tensor]:
    """Return the tensors of a commit that all ranks must hold alike, in the same order on all of them.

    ``rank_local`` names the tensors of each component that may differ.
    """
    return [
        Tensor(f"{name}.{spec.name}", spec, arena.bytes_of(spec.name))
        for name, arena in snapshot.arenas.items()
        if name in rank_local
        for spec in arena.layout.specs
        if spec.name not in rank_local[name]
    ]


def ballot_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return a rank's ballot: the digest of its tensors as two numbers, and how many tensors there are."""
    return [*digest_numbers(*(each.data for each in tensors)), len(tensors)]


def compare(world: World, tensors: Sequence[Tensor], root: int, host: str, *, heal: bool) -> list[str]:
    """Return a line for each tensor of this rank that differs from the root's; ``heal`` replaces its bytes.

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
            numbers = f"{count} of {total} numbers, by {largest:.3g} at most"
            found.append(f"{tensor.name}, {tensor.spec}: {numbers}, on rank {world.rank()} on {host}")
    return found


def _measure(world: World, tensor: Tensor, root: int, *, heal: bool) -> tuple[int, float]:
    """Return how many numbers of this rank's tensor differ from the root's, and by how much at most.

    Pieces keep the root's copy small.
    """
    count, largest = 0, 0.0
    scratch = allocate(min(PIECE, tensor.spec.nbytes))
    for start in range(0, tensor.spec.nbytes, PIECE):
        piece = tensor.data[start : start + PIECE]
        roots = scratch[: len(piece)]
        if world.rank() == root:
            roots[:] = piece
        world.broadcast(roots, root, f"hvdrecover.guard.{tensor.spec.nbytes}.{start}")
        different, by = _apart(piece, roots, tensor.spec.dtype)
        count, largest = count + different, float(np.maximum(largest, by))  # NaN if either is
        if heal:
            piece[:] = roots
    return count, largest


def _apart(mine: Bytes, others: Bytes, dtype: str) -> tuple[int, float]:
    """Return how many numbers differ in their bits, and the largest absolute difference."""
    x, y = different(dtype, mine, others)
    with np.errstate(all="ignore"):
        return len(x), float(np.max(np.abs(x - y), initial=0.0))


# -- votes, and the words for groups of ranks ----------------------------------------------------------------


@dataclass(frozen=True)
class Vote:
    """The division of ranks that hold different things."""

    right: tuple[int, ...]  # the largest party; of several as large, the one that has the lowest rank
    wrong: tuple[int, ...]  # all other ranks
    tied: bool  # whether another party is as large, so that the vote cannot find the right one


def vote(ballots: Sequence[Hashable]) -> Vote:
    parties: dict[Hashable, list[int]] = {}
    for rank, ballot in enumerate(ballots):
        parties.setdefault(ballot, []).append(rank)
    largest, *others = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks[0]))
    wrong = sorted(rank for ranks in others for rank in ranks)
    return Vote(tuple(largest), tuple(wrong), any(len(ranks) == len(largest) for ranks in others))


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def by_value(values: Sequence[object]) -> str:
    """Each rank's value, as ``8 on ranks 0-2; 16 on rank 3``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {named(holders)}" for value, holders in ranks.items())


def first_lines(lines: Sequence[str], most: int = 10) -> list[str]:
    """The first lines of a list, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]
