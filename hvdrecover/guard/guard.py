"""The hook that compares this rank with the others, and raises, warns or heals as the `Guard` says.

1. At each rendezvous the ranks send digests of their structure and of the parameters in their newest commit.
   Different structures are an error. Ranks that hold the majority's parameters are preferred as source rank.
2. At every tenth commit they send digests of the parameters that they have just copied. If these differ, the
   ranks vote; the minority is named, and takes the majority's tensors if the user wants that.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from hvdrecover import heartbeat
from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.data import version
from hvdrecover.errors import DataChangedError, DivergedError, StructureError
from hvdrecover.guard import comparison
from hvdrecover.guard.comparison import Description, Tensor, Vote, by_value, first_lines, named, vote
from hvdrecover.guard.settings import Guard
from hvdrecover.state.adapter import Entry, gather_json
from hvdrecover.state.hooks import Context, Hook, Moment, Table
from hvdrecover.state.memory import Memory

_ABSENT = [0, 0, -1]  # the ballot of a rank that has made no commit


class GuardHook(Hook):
    """This rank's part in the comparisons. Without a guard, it only learns whether others have one."""

    votes_at = ("rendezvous",)

    def __init__(self, guard: Guard | None, context: Context) -> None:
        self._guard = guard
        self._context = context
        self._world = context.world
        self._contents = context.contents
        self._fresh = True  # until the first rendezvous
        self._description: Description = ()
        if guard is not None:
            self._description = comparison.describe(guard, context.framework, context.contents)

    # -- rendezvous ------------------------------------------------------------------------------------

    def numbers(self, moment: Moment) -> Sequence[int]:
        held, ballot = moment.held, _ABSENT
        compares = self._guard is not None and self._guard.parameters_every_commits is not None
        if compares and held is not None and held.id.generation:
            ballot = comparison.ballot_of(self._tensors(held))
        return [*comparison.digest_of(self._description), *ballot]

    def prefer(self, holders: Sequence[int], table: Table) -> Sequence[int]:
        return [holders[place] for place in _vote_of(holders, table).right]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        election = moment.elected
        if election is None:
            return None
        try:
            self._compare_structures(alike=bool((table[:, :2] == table[0, :2]).all()))
            if election.newest is None or self._guard is None:
                return None
            found = _vote_of(election.holders, table)
            odd = tuple(election.holders[place] for place in found.wrong)
            if odd:
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
        lines = comparison.differences(
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
        every = self._guard.parameters_every_commits if self._guard is not None else None
        commit = memory.attempt
        if every is None or commit.commit % every or self._world.size() == 1:
            return False
        snapshot = memory.newest if memory.newest is not None and memory.newest.id == commit else None
        mine = _ABSENT if snapshot is None else comparison.ballot_of(self._tensors(snapshot))
        table = self._world.allgather(mine, "hvdrecover.guard.ballots")
        ballots = [tuple(row) for row in table.tolist()]
        result = vote(ballots)
        if not result.wrong or tuple(_ABSENT) in ballots or snapshot is None:
            return False
        counts = [count for _, _, count in ballots]
        if len(set(counts)) > 1:  # for example, an optimizer has slots on some ranks only
            lines = [f"number of tensors: {by_value(counts)}"]
            self._diverged(result, snapshot.id, lines, {"warn": "continuing"})
            return False
        return self._settle(result, snapshot, memory)

    def _settle(self, result: Vote, snapshot: Snapshot, memory: Memory) -> bool:
        """Name the tensors that differ; all ranks hold tensors of the same names."""
        assert self._guard is not None
        wrong = self._world.rank() in result.wrong
        heals = self._guard.on_divergence == "heal" and wrong
        if heals:
            snapshot = memory.separate(snapshot)  # the writer may be reading the old bytes
        host = self._context.config.host
        found = comparison.compare(self._world, self._tensors(snapshot), result.right[0], host, heal=heals)
        apart = [line for row in gather_json(self._world, found, "hvdrecover.guard.found") for line in row]
        follows = {"warn": "continuing", "heal": f"healed from rank {result.right[0]}"}
        self._diverged(result, snapshot.id, first_lines(apart), follows, apart)
        memory.newest = snapshot
        return heals

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

    def _tensors(self, snapshot: Snapshot) -> list[Tensor]:
        """The tensors of a commit that all ranks must hold alike."""
        return comparison.shared_tensors(snapshot, self._contents.rank_local())

    # -- training data ---------------------------------------------------------------------------------

    def resuming(self, stored: Snapshot, where: str) -> None:
        """Compare the version of the training data with the version in the commit to resume from.

        The commit's cursors are changed if the epoch is restarted.
        """
        data = self._guard.data if self._guard is not None else None
        if self._guard is None or data is None or stored.dataset is None:
            return
        if stored.dataset.get("version") == 1:  # a fingerprint of the data, by an earlier release
            return
        lines = version.differences(stored.dataset, data)
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


def _vote_of(holders: Sequence[int], table: Table) -> Vote:
    """Divide the holders of the newest commit by their ballots; the result has places in ``holders``."""
    return vote([tuple(table[rank, 2:].tolist()) for rank in holders])
