"""The hook that compares this rank with the others, and raises, warns or heals as the `Guard` says.

1. At each rendezvous the ranks send digests of their structure, which is a description of state and script,
   and of the parameters in their newest commit. Only if the structures differ are the descriptions compared;
   that is an error. Ranks that hold the majority's parameters are preferred as source rank.
2. At every tenth commit they send a digest of the parameters and optimizer slots in the commit that they have
   just made in memory: it lies there as bytes, and stands still. If the digests differ, they compare a digest
   of each tensor, and then the tensors that differ. The ranks vote; the minority is named, and takes the
   majority's tensors if the user wants that.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdrecover import heartbeat
from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.arena import Bytes, TensorSpec, allocate, digest, digest_numbers
from hvdrecover.checkpoint.inspection import different
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.data import version
from hvdrecover.errors import DataChangedError, DivergedError, StructureError
from hvdrecover.guard import Guard
from hvdrecover.state.adapter import Entry, gather_json
from hvdrecover.state.hooks import Context, Hook, Moment, Table
from hvdrecover.state.memory import Memory
from hvdrecover.version import __version__

_PIECE = 1 << 26  # bytes in one broadcast; a multiple of every dtype's size
_ABSENT = [0, 0, -1]  # the ballot of a rank that has made no commit


class Tensor(NamedTuple):
    name: str  # with its attribute's, such as model.0.weight
    spec: TensorSpec
    data: Bytes  # writable


class Vote(NamedTuple):
    """The division of ranks that hold different things."""

    right: tuple[int, ...]  # the largest party; of several as large, the one that has the lowest rank
    wrong: tuple[int, ...]  # all other ranks
    tied: bool  # whether another party is as large, so that the vote cannot find the right one


class GuardHook(Hook):
    """This rank's part in the comparisons. Without a guard, it only learns whether others have one."""

    votes_at = ("rendezvous",)

    def __init__(self, guard: Guard | None, context: Context) -> None:
        self._guard = guard
        self._every = None if guard is None else guard.parameters_every_commits
        self.inspects = self._every is not None
        self._context = context
        self._world = context.world
        self._fresh = True  # until the first rendezvous
        self._description = () if guard is None else _describe(guard, context)

    # -- rendezvous ------------------------------------------------------------------------------------

    def numbers(self, moment: Moment) -> Sequence[int]:
        structure = "\0".join(f"{each.name}\0{each.value}" for each in self._description)
        held = moment.held
        compares = self._every is not None and held is not None and held.id.generation
        return [*digest_numbers(structure.encode()), *(self._ballot(held) if compares else _ABSENT)]

    def prefer(self, holders: Sequence[int], table: Table) -> Sequence[int]:
        return [holders[place] for place in _vote(table[holders, 2:].tolist()).right]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        election = moment.elected
        if election is None:
            return None
        try:
            self._compare_structures(alike=bool((table[:, :2] == table[0, :2]).all()))
            if election.newest is None or self._guard is None:
                return None
            found = _vote(table[election.holders, 2:].tolist())
            if odd := tuple(election.holders[place] for place in found.wrong):
                follows = f"all continue with those of rank {election.root}"
                result = Vote((election.root,), odd, found.tied)
                lines = ["found by digests at the rendezvous after a fault"]
                self._diverged(result, election.newest, lines, {"warn": follows, "heal": follows})
        except (StructureError, DivergedError) as error:
            return error
        return None

    def _compare_structures(self, *, alike: bool) -> None:
        fresh, self._fresh = self._fresh, False
        if alike:
            return
        entries = [dataclasses.astuple(each) for each in self._description]
        mine = None if self._guard is None else [fresh, entries]
        rows = gather_json(self._world, mine, "hvdrecover.guard.structure")
        # A script may choose settings by the number of ranks, and training changes them.
        lines = _differences(
            [row and tuple(Entry(*each) for each in row[1]) for row in rows],
            settings=all(row is None or row[0] for row in rows),
        )
        if lines:
            self._context.events.emit("structure", differences=lines)
            raise StructureError(
                "the ranks were not started with the same",
                lines,
                "Have all ranks build the same state, from the same script and packages; then start again.",
            )

    # -- parameters ------------------------------------------------------------------------------------

    def inspect(self, memory: Memory) -> bool:
        """Compare the parameters of a commit across the ranks, if a comparison is due."""
        commit = memory.attempt
        if self._every is None or commit.commit % self._every or self._world.size() == 1:
            return False
        snapshot = memory.newest if memory.newest is not None and memory.newest.id == commit else None
        table = self._world.allgather(self._ballot(snapshot), "hvdrecover.guard.ballots")
        ballots = table.tolist()
        result = _vote(ballots)
        if not result.wrong or _ABSENT in ballots or snapshot is None:
            return False
        counts = [count for _, _, count in ballots]
        if len(set(counts)) > 1:  # for example, an optimizer has slots on some ranks only
            lines = [f"number of tensors: {_by_value(counts)}"]
            self._diverged(result, snapshot.id, lines, {"warn": "continuing"})
            return False
        return self._settle(result, snapshot, memory)

    def _ballot(self, snapshot: Snapshot | None) -> list[int]:
        """Return the digest of a commit's tensors as two numbers, and how many tensors there are."""
        if snapshot is None:
            return _ABSENT
        tensors = self._tensors(snapshot)
        return [*digest_numbers(*(each.data for each in tensors)), len(tensors)]

    def _tensors(self, snapshot: Snapshot) -> list[Tensor]:
        """The tensors of a commit that all ranks must hold alike, in the same order on all of them."""
        rank_local = self._context.contents.rank_local()
        return [
            Tensor(f"{name}.{spec.name}", spec, arena.bytes_of(spec.name))
            for name, arena in snapshot.arenas.items()
            if name in rank_local
            for spec in arena.layout.specs
            if spec.name not in rank_local[name]
        ]

    def _settle(self, result: Vote, snapshot: Snapshot, memory: Memory) -> bool:
        """Name the tensors that differ from the majority's; replace this rank's if it is to be healed."""
        assert self._guard is not None
        rank, root, host = self._world.rank(), result.right[0], self._context.config.host
        heals = self._guard.on_divergence == "heal" and rank in result.wrong
        if heals:
            snapshot = memory.separate(snapshot)  # the writer may be reading the old bytes
        tensors = self._tensors(snapshot)
        digests = [half for each in tensors for half in digest_numbers(each.data)]
        # All ranks hold tensors of the same names, dtypes and shapes.
        table = self._world.allgather(digests, "hvdrecover.guard.tensors").reshape(self._world.size(), -1, 2)
        differs = (table != table[root]).any(axis=2)
        found = []
        for place in differs.any(axis=0).nonzero()[0].tolist():
            tensor, here = tensors[place], bool(differs[rank, place])
            numbers = self._measure(tensor, root, heal=heals and here)
            if here:
                found.append(f"{tensor.name}, {tensor.spec}: {numbers}, on rank {rank} on {host}")
        apart = [line for row in gather_json(self._world, found, "hvdrecover.guard.found") for line in row]
        follows = {"warn": "continuing", "heal": f"healed from rank {root}"}
        self._diverged(result, snapshot.id, first_lines(apart), follows, apart)
        memory.newest = snapshot
        return heals

    def _measure(self, tensor: Tensor, root: int, *, heal: bool) -> str:
        """Return how many numbers differ from the root's, and by how much at most; all ranks call this."""
        count, largest = 0, 0.0
        scratch = allocate(min(_PIECE, tensor.spec.nbytes))
        # Pieces keep the root's copy small.
        for start in range(0, tensor.spec.nbytes, _PIECE):
            piece = tensor.data[start : start + _PIECE]
            roots = scratch[: len(piece)]
            if self._world.rank() == root:
                roots[:] = piece
            self._world.broadcast(roots, root, f"hvdrecover.guard.{tensor.spec.nbytes}.{start}")
            mine, others = different(tensor.spec.dtype, piece, roots)
            with np.errstate(all="ignore"):
                by = np.max(np.abs(mine - others), initial=0.0)
                count, largest = count + len(mine), float(np.maximum(largest, by))  # NaN if either is
            if heal:
                piece[:] = roots
        return f"{count} of {math.prod(tensor.spec.shape)} numbers, by {largest:.3g} at most"

    def _diverged(
        self,
        result: Vote,
        commit: CommitId,
        lines: list[str],
        follows: dict[str, str],
        tensors: Sequence[str] = (),
    ) -> None:
        """Report diverged ranks. ``follows`` says what happens next, by policy; a policy not in it raises."""
        assert self._guard is not None
        policy = self._guard.on_divergence
        sides = "and nobody can tell which are right" if result.tied else "which more ranks agree on"
        wrong, right = named(result.wrong), named(result.right)
        problem = f"the parameters of {wrong} are not those of {right} at commit {commit}, {sides}"
        self._context.announce(
            "diverged",
            f"{problem}: {'; '.join(lines)}; {follows.get(policy, 'stopping')}",
            level=logging.WARNING,
            generation=commit.generation,
            commit=commit.commit,
            policy=policy,
            ranks=list(result.wrong),
            tied=result.tied,
            tensors=list(tensors[:100]),
        )
        if self._world.rank() in result.wrong and not result.tied:
            heartbeat.page.diverged += 1  # a host that diverges twice is excluded
        if policy not in follows:
            raise DivergedError(
                problem,
                lines,
                "Resume from an earlier commit. If a host diverges again, it is faulty; "
                "Guard(on_divergence='heal') has the majority's tensors replace the others.",
            )

    # -- training data ---------------------------------------------------------------------------------

    def resuming(self, stored: Snapshot, where: str) -> None:
        """Compare the version of the training data with the version in the commit to resume from."""
        if self._guard is None or self._guard.data is None or stored.dataset is None:
            return
        if stored.dataset.get("version") == 1:  # a fingerprint of the data, by an earlier release
            return
        lines = version.differences(stored.dataset, self._guard.data)
        if not lines:
            return
        policy = self._guard.data_changed
        follows = {"raise": "stopping", "warn": "continuing", "restart_epoch": "restarting the epoch"}
        self._context.announce(
            "data_changed",
            f"the training data have changed since {where}: {'; '.join(lines)}; {follows[policy]}",
            level=logging.WARNING,
            policy=policy,
            differences=lines,
        )
        if policy == "raise":
            raise DataChangedError(where, lines)
        if policy == "restart_epoch":  # even if the length of the data has changed
            cursors = stored.state["samplers"].items()
            stored.state["samplers"] = {
                name: {"epoch": each["epoch"], "processed_num": 0} for name, each in cursors
            }


# -- structure -----------------------------------------------------------------------------------------------


def _describe(guard: Guard, context: Context) -> tuple[Entry, ...]:
    """Describe a state's guard and attributes, the versions at work and the training script."""
    framework, contents = context.framework, context.contents
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
            entries += [
                dataclasses.replace(each, name=name + each.name) for each in framework.describe(value)
            ]
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


def _differences(descriptions: Sequence[tuple[Entry, ...] | None], *, settings: bool) -> list[str]:
    """Return the first differences between the ranks, a line each; ``settings`` adds hyper-parameters."""
    unguarded = [rank for rank, each in enumerate(descriptions) if each is None]
    if unguarded:
        return [f"guard: none on {named(unguarded)}"] if len(unguarded) < len(descriptions) else []
    tables = [
        {entry.name: entry.value for entry in each or () if settings or not entry.setting}
        for each in descriptions
    ]
    lines = [
        f"{name}: {_by_value([table.get(name, 'missing') for table in tables])}"
        for name in dict.fromkeys(name for table in tables for name in table)
        if len({table.get(name) for table in tables}) > 1
    ]
    if not lines and len({tuple(table) for table in tables}) > 1:
        lines = ["the same parameters, in another order"]
    return first_lines(lines)


# -- votes, and the words for groups of ranks ----------------------------------------------------------------


def _vote(ballots: Sequence[Sequence[int]]) -> Vote:
    """Divide ranks by their ballots; the result has places in ``ballots``."""
    parties: dict[tuple[int, ...], list[int]] = {}
    for rank, ballot in enumerate(ballots):
        parties.setdefault(tuple(ballot), []).append(rank)
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


def _by_value(values: Sequence[object]) -> str:
    """Each rank's value, as ``8 on ranks 0-2; 16 on rank 3``."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {named(holders)}" for value, holders in ranks.items())


def first_lines(lines: Sequence[str], most: int = 10) -> list[str]:
    """The first lines of a list, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]
