"""The watch over one rank: compares it with the others, and acts on what the user has decided."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from hvdrecover import heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.companions import Moment, Table, Voter
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.guard import data, parameters, rank_local, structure
from hvdrecover.elastic.guard.parameters import Difference, Shared
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.guard.structure import Description
from hvdrecover.elastic.guard.votes import Vote, named, vote
from hvdrecover.elastic.interfaces import Entry
from hvdrecover.errors import DataChangedError, DivergedError, StructureError

_ABSENT = [0, 0, -1]  # the ballot of a rank that has made no commit


class Watch(Voter):
    """The watch.

    Args:
        guard: what the user has decided; None watches nothing, but for who has a guard and who has none.
        context: the state's surroundings.
    """

    def __init__(self, guard: Guard | None, context: Context) -> None:
        self._guard = guard
        self._context = context
        self._framework = context.framework
        self._world = context.world
        self._contents = context.contents
        self._host = context.config.host
        self._fresh = True
        self._warned = False  # that the ranks hold different plain objects
        self._entries: tuple[Entry, ...] = ()
        if guard is not None:
            self._entries = structure.describe(guard, context.framework, context.contents)

    # -- rendezvous ------------------------------------------------------------------------------------

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send digests of this rank's structure and of the parameters in its newest commit."""
        if moment.kind != "rendezvous":
            return ()
        return [*structure.numbers(self._entries), *self._ballot(moment.held)]

    def prefer(self, holders: Sequence[int], table: Table) -> Sequence[int]:
        """Prefer the ranks whose parameters more ranks hold than any other."""
        return [holders[place] for place in _vote_of(holders, table).right]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Return an error if the ranks were not started with the same, or hold different parameters.

        Either only if the user wants that; else there is a warning.
        """
        if moment.elected is None:
            return None
        try:
            self._compare(moment, table)
        except (StructureError, DivergedError) as error:
            return error
        return None

    def _compare(self, moment: Moment, table: Table) -> None:
        election, held = moment.elected, moment.held
        assert election is not None
        self._compare_structures(alike=bool((table[:, :2] == table[0, :2]).all()))
        if election.newest is None or self._guard is None:
            return
        if self._world.size() > 1:
            mine = held if held is not None and held.id == election.newest else None
            self._compare_rank_local(mine, f"all continue with those of rank {election.root}")
        result = _vote_of(election.holders, table)
        odd = tuple(election.holders[place] for place in result.wrong)
        if not odd:
            return
        holders = Vote((election.root,), odd, result.tied)
        lines = ["found by digests at the rendezvous after a fault"]
        raises = self._guard.on_divergence == "raise"
        follows = "stopping" if raises else f"all continue with those of rank {election.root}"
        self._say_diverged(holders, election.newest, lines, follows)
        if raises:
            raise _diverged(holders, election.newest, lines)
        if self._world.rank() in odd and not result.tied:
            heartbeat.diverged()

    def _compare_structures(self, *, alike: bool) -> None:
        mine = Description(self._entries, self._fresh) if self._guard is not None else None
        self._fresh = False
        if alike:
            return
        rows = gather_json(self._world, mine and mine.as_json(), "hvdrecover.guard.structure")
        lines = structure.differences([row and Description.from_json(row) for row in rows])
        if lines:
            self._context.events.emit("structure", differences=lines)
            raise StructureError(
                "the ranks were not started with the same",
                lines,
                "Have all ranks build the same state, from the same script and packages; then start again.",
            )

    # -- parameters ------------------------------------------------------------------------------------

    def _ballot(self, snapshot: Snapshot | None) -> list[int]:
        """Return this rank's vote at the rendezvous after a fault, before any of them is believed."""
        compares = self._guard is not None and self._guard.parameters_every_commits is not None
        if not compares or snapshot is None or snapshot.id.generation == 0:
            return _ABSENT
        return parameters.ballot(snapshot, self._shared(snapshot))

    def inspect(self, memory: Memory) -> bool:
        """Compare the parameters of a commit with those of the other ranks, if it is time to.

        Args:
            memory: holds the commit, unless this rank has passed it over.

        Returns:
            Whether tensors of the commit in memory were replaced, so that it must be loaded.

        Raises:
            DivergedError: they differ, and the user wants to know.
        """
        every = self._guard.parameters_every_commits if self._guard is not None else None
        commit = memory.attempt
        if every is None or commit.commit % every or self._world.size() == 1:
            return False
        snapshot = memory.newest if memory.newest is not None and memory.newest.id == commit else None
        mine = _ABSENT if snapshot is None else parameters.ballot(snapshot, self._shared(snapshot))
        own = rank_local.ballot(None if self._warned else snapshot, self._contents.rank_local)
        table = self._world.allgather([*mine, *own], "hvdrecover.guard.ballots")
        ballots = [tuple(row) for row in table[:, :3].tolist()]
        if rank_local.differ(table[:, 3:]):
            self._compare_rank_local(snapshot, "after a recovery all continue with those of one rank")
        result = vote(ballots)
        if result.agreed or tuple(_ABSENT) in ballots or snapshot is None:
            return False
        if len({count for _, _, count in ballots}) > 1:
            self._report_other_names(result, snapshot)
            return False
        return self._settle(result, snapshot, memory)

    def _report_other_names(self, result: Vote, snapshot: Snapshot) -> None:
        """Some ranks hold tensors that others lack, which can't be healed."""
        assert self._guard is not None
        tensors = parameters.tensors_of(snapshot, self._shared(snapshot))
        mine = Description(tuple(Entry(each.name, str(each.spec)) for each in tensors)).as_json()
        rows = gather_json(self._world, mine, "hvdrecover.guard.names")
        lines = structure.differences([Description.from_json(row) for row in rows])
        warns = self._guard.on_divergence == "warn"
        self._say_diverged(result, snapshot.id, lines, "continuing" if warns else "stopping")
        if not warns:
            raise _diverged(result, snapshot.id, lines)

    def _settle(self, result: Vote, snapshot: Snapshot, memory: Memory) -> bool:
        """All hold tensors of the same names, and not the same ones."""
        assert self._guard is not None
        policy, wrong = self._guard.on_divergence, self._world.rank() in result.wrong
        heals = policy == "heal" and wrong
        if heals:
            snapshot = memory.separate(snapshot)
        tensors = parameters.tensors_of(snapshot, self._shared(snapshot))
        found = parameters.compare(self._world, tensors, result.right[0], self._host, heal=heals)
        rows = gather_json(
            self._world, [dataclasses.asdict(each) for each in found], "hvdrecover.guard.found"
        )
        differences = [Difference(**each) for row in rows for each in row]
        lines = parameters.listed(differences)
        follows = {"raise": "stopping", "warn": "continuing", "heal": f"healed from rank {result.right[0]}"}
        self._say_diverged(result, snapshot.id, lines, follows[policy], differences)
        if wrong and not result.tied:
            heartbeat.diverged()
        if policy == "raise":
            raise _diverged(result, snapshot.id, lines)
        memory.newest = snapshot
        return heals

    def _say_diverged(
        self,
        result: Vote,
        commit: CommitId,
        lines: Sequence[str],
        follows: str,
        differences: Sequence[Difference] = (),
    ) -> None:
        assert self._guard is not None
        self._context.announce(
            "diverged",
            f"{_problem(result, commit)}: {'; '.join(lines)}; {follows}",
            level=logging.WARNING,
            generation=commit.generation,
            commit=commit.commit,
            policy=self._guard.on_divergence,
            ranks=list(result.wrong),
            tied=result.tied,
            tensors=[str(each) for each in differences[:100]],
        )

    def _shared(self, snapshot: Snapshot) -> Shared:
        """Names of the tensors that all ranks must hold alike."""
        return {
            name: snapshot.arenas[name].layout.by_name.keys() - self._framework.rank_local(component)
            for name, component in self._contents.components().items()
            if name in snapshot.arenas
        }

    # -- rank-local state ------------------------------------------------------------------------------

    def _compare_rank_local(self, snapshot: Snapshot | None, follows: str) -> None:
        """Warn once of what ranks hold differently in one commit, and a recovery makes the same."""
        found = rank_local.found(snapshot, self._contents.rank_local()) if snapshot is not None else None
        rows = gather_json(self._world, [self._warned, found], "hvdrecover.guard.rank_local")
        if any(warned for warned, _ in rows):
            self._warned = True  # by a rank that may be gone, or before this one had started
            return
        lines = rank_local.differences(
            {rank: each for rank, (_, each) in enumerate(rows) if each is not None}
        )
        if lines:
            self._warned = True
            words = f"{'; '.join(lines)}; {follows}. {rank_local.REMEDY}"
            self._context.announce("rank_local", words, level=logging.WARNING, differences=lines)

    # -- data ------------------------------------------------------------------------------------------

    def resuming(self, stored: Snapshot, where: str) -> None:
        """Compare the training data with those of a durable commit that is about to be loaded.

        Args:
            stored: the commit; its cursors are changed if the epoch is to begin anew.
            where: what to call it.

        Raises:
            DataChangedError: the training data have changed, and the user wants to know.
        """
        lines = data.changes(self._guard, stored, where)
        if not lines or self._guard is None:
            return
        policy = self._guard.data_changed
        follows = {"raise": "stopping", "warn": "continuing", "restart_epoch": "beginning the epoch anew"}
        self._context.announce(
            "data_changed",
            f"the training data have changed since {where}: {'; '.join(lines)}; {follows[policy]}",
            level=logging.WARNING,
            policy=policy,
            differences=lines,
        )
        if policy == "raise":
            raise DataChangedError(where, lines)
        if policy == "restart_epoch":
            data.restart_epoch(stored.state)


def _vote_of(holders: Sequence[int], table: Table) -> Vote:
    """Count the ballots of some ranks; ranks in the result are places among them."""
    return vote([tuple(table[rank, 2:].tolist()) for rank in holders])


def _diverged(result: Vote, commit: CommitId, lines: list[str]) -> DivergedError:
    return DivergedError(
        _problem(result, commit),
        lines,
        "Resume from an earlier commit. If a host diverges again, it is faulty; "
        "Guard(on_divergence='heal') has the majority's tensors replace the others.",
    )


def _problem(result: Vote, commit: CommitId) -> str:
    sides = "and nobody can tell which are right" if result.tied else "which more ranks agree on"
    wrong, right = named(result.wrong), named(result.right)
    return f"the parameters of {wrong} are not those of {right} at commit {commit}, {sides}"
