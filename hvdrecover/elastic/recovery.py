"""This rank among the others: rendezvous, agreement on one state, and rollbacks."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover import heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import digest_numbers
from hvdrecover.checkpoint.near.tier import Recalled
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.agreement import reports
from hvdrecover.elastic.agreement.election import Election, Published, elect
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.agreement.revival import Claimed, Root, revived
from hvdrecover.elastic.agreement.transfer import Agreement, Source, digests, receive, send, send_failure
from hvdrecover.elastic.assembly import Rank
from hvdrecover.elastic.commits.contents import Strict
from hvdrecover.elastic.companions import Moment, Observer
from hvdrecover.elastic.durable.near import Files
from hvdrecover.elastic.horovod import fault_of, mistake_of
from hvdrecover.elastic.lifecycle import stalls
from hvdrecover.elastic.lifecycle.leaving import Departure
from hvdrecover.errors import RecoveryError
from hvdrecover.guard.numbers import RolledBack

Hear = Callable[[], BaseException | None]


class Recovery:
    """One rank's side of recoveries.

    Args:
        rank: the parts of this rank's state.

    Attributes:
        reset_callbacks: functions to call when the ranks are others than before.
        root: the rank whose state all ranks have taken at the last agreement.
        timed: adds the time of what is inside to a part of this recovery.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._context = rank.context
        self._memory = rank.memory
        self._durable = rank.durable
        self._own = rank.own
        self._companions = rank.companions
        self.reset_callbacks: list[Callable[[], None]] = []
        self.root = 0
        self.timed = rank.timings.of
        self._unheard: Hear | None = None  # at a commit that failed on this rank
        self._unheard_at: tuple[Mapping[str, tuple[int, int]], int] = ({}, 0)

    # -- rendezvous and agreement ----------------------------------------------------------------------

    def rendezvous(self, reason: str, steps: int = 0) -> None:
        """Leave the ranks that there were, and rendezvous with those that there are, after a fault.

        Args:
            reason: the fault, in words.
            steps: how many steps this rank has rolled back for it.

        Raises:
            RendezvousError: a rank was lost during the rendezvous.
            RemovedError: this host is no longer part of the job.
        """
        self._context.events.emit("reset", reason=reason, steps=steps)
        with self.timed("reset"):
            self._context.world.shutdown()
        self._rank.hosts.forget()  # the rendezvous heeds all changes so far, and none after it
        with self.timed("rendezvous"):
            self._context.world.init()
        stalls.forget()

    def reset(self) -> None:
        """The ranks are others than before: give samplers their places, and call the user's functions."""
        self._place_samplers()
        for callback in self.reset_callbacks:
            callback()

    def agree(self, reached: tuple[int, int] = (0, 0), *, kept: bool = False) -> Source:
        """Bring all ranks to one commit: the newest in any memory, else the newest durable one.

        The rank that holds it sends its present state under that commit's number, or the commit itself. If
        there is no commit at all, rank 0 sends its initial state.

        Args:
            reached: how far the job had come before, for the line that says what is repeated.
            kept: whether the attributes still equal the commit in memory.

        Returns:
            Where the state came from.

        Raises:
            CheckpointError: rank 0 could not load a durable commit.
            RecoveryError: the same, on the other ranks.
            StructureError: the ranks were not started with the same, and the state has a guard.
            DivergedError: memories hold one commit with different parameters, and the guard is to raise it.
            PerRankError: the commit has the rank-local states of other ranks.
        """
        context, started = self._context, self._context.clock.monotonic()
        context.place.arrived()
        context.events.rank = context.world.rank()
        heartbeat.take_rank(context.world.rank())
        recalled = self._recall()
        election = self._elect(recalled)
        self._own.rendezvous(context.world, context.place.among_all, self._memory.newest, election.newest)
        claimed = self._revive(recalled) if election.revives else None
        self.root = election.root if claimed is None or claimed.root is None else claimed.root
        try:
            if context.world.rank() == self.root:
                agreement = self._lead(election, recalled, claimed, kept)
            else:
                agreement = self._follow(election, recalled, claimed)
        except BaseException:
            self._durable.near.give_back()
            self._memory.stay()
            raise
        self._adopt(agreement)
        self._report(agreement, started, reached, claimed)
        self._companions.notify(Observer.agreed, agreement)
        return agreement.source

    def _recall(self) -> Recalled | None:
        """Return the host's near commit if it is newer than all in memory, and this process has none."""
        mine = self._memory.last
        rows = self._context.world.allgather([mine.generation, mine.commit], "hvdrecover.memories")
        if mine.generation:
            return None
        return self._durable.near.recall(max(CommitId(*row) for row in rows.tolist()))

    def _elect(self, recalled: Recalled | None) -> Election:
        moment, self._unheard = Moment("rendezvous", self._memory.newest), None
        own, job = self._memory.last, self._context.place.job
        if recalled is not None:
            own, job = recalled.snapshot.id, recalled.job
        numbers = [digest_numbers(text.encode())[0] for text in (job, self._durable.root)]
        row = [own.generation, own.commit, recalled is not None, *numbers, self._context.world.past.functions]
        published, *tables = self._companions.exchange(self._context.world, moment, row)
        if (published[:, 4:] != published[0, 4:]).any():
            self._refuse_other_states()
        words = [Published(CommitId(*row[:2]), bool(row[2]), row[3]) for row in published.tolist()]
        election = elect(words, lambda holders: self._companions.prefer(holders, tables))
        verdict = self._companions.verdict(dataclasses.replace(moment, elected=election), tables)
        if verdict is not None:
            raise verdict
        return election

    def _refuse_other_states(self) -> None:
        """Refuse to take one rank's state for another's of the same script.

        Raises:
            RecoveryError: on all ranks, so that all start again, and come to the same state.
        """
        mine = [self._context.world.past.functions, self._durable.root]
        states = gather_json(self._context.world, mine, "hvdrecover.states")
        listed = ", ".join(
            f"rank {rank} in call {number} of a training function, at checkpoint root {root or None!r}"
            for rank, (number, root) in enumerate(states)
        )
        raise RecoveryError(
            f"the ranks are at different states of the script: {listed}. All ranks start again, to reach "
            "the same state. Give each state its own checkpoint root, the same on all ranks: then a finished "
            "state is not trained again"
        )

    def _revive(self, recalled: Recalled | None) -> Claimed:
        """All processes have just started: let rank 0 take the root, and ask which near commit counts."""
        root = None
        if self._context.world.rank() == 0:
            root = Root(lambda left: (self._claim(left), self._context.place.job), self._durable.standing)
        return revived(self._context, recalled, root, self._durable.near.pass_over)

    def _follow(self, election: Election, recalled: Recalled | None, claimed: Claimed | None) -> Agreement:
        """Receive what the elected rank sends, and load it."""
        newest = election.newest if claimed is None else claimed.commit
        held, mine = self._held(newest, recalled)
        agreement = receive(self._context.world, self.root, held, mine, self._durable.near.base)
        self._context.place.job = agreement.job
        # Whichever rank fails next: its guardian knows from which commit the rank has resumed.
        heartbeat.notify(loaded=agreement.loaded)
        self._load(agreement.snapshot, strict=self._among_ranks)
        return agreement

    def _held(self, commit: CommitId | None, recalled: Recalled | None) -> Files:
        """Return the files that this rank, or its host, has of a commit, or of another of that number."""
        for mine in (self._memory.newest, None if recalled is None else recalled.snapshot):
            if mine is not None and mine.id == commit:
                return mine.arenas, digests(mine)
        return ({}, {}) if commit is None else self._durable.near.held(commit)

    def _lead(
        self, election: Election, recalled: Recalled | None, claimed: Claimed | None, kept: bool
    ) -> Agreement:
        """Decide what all resume from, and send it; on the elected rank."""
        try:
            if election.newest is not None:
                agreement = self._from_memory(election.newest, recalled, kept)
            elif recalled is not None and claimed is not None and claimed.root is not None:
                agreement = self._from_near(recalled, claimed)
            else:
                agreement = self._from_root(self._claim() if claimed is None else claimed.generation)
        except Exception as error:
            send_failure(self._context.world, self.root, error)
            raise
        send(self._context.world, self.root, agreement)
        return agreement

    def _from_memory(self, elected: CommitId, recalled: Recalled | None, kept: bool) -> Agreement:
        # A new generation: a rank left behind may hold, or be writing, another commit of this number.
        newest = CommitId(elected.generation + 1, elected.commit)
        heartbeat.notify(loaded="")  # no durable commit can be the cause of later faults
        if recalled is None:
            kept = kept and not self._context.contents.per_rank
            snapshot = self._memory.capture(newest, finished=self._memory.finished, unchanged=kept)
            return Agreement(snapshot, "memory", self._context.place.job)
        self._load(recalled.snapshot, strict=self._among_ranks)
        return Agreement(dataclasses.replace(recalled.snapshot, id=newest), "memory", recalled.job)

    def _from_near(self, recalled: Recalled, claimed: Claimed) -> Agreement:
        self._context.place.job = claimed.job
        name = recalled.snapshot.id.name
        heartbeat.notify(loaded=name)
        with self.timed("load"):
            snapshot = self._resumed(recalled.snapshot, claimed.generation, f"near commit {name}")
        return Agreement(snapshot, "near", claimed.job, name)

    def _claim(self, left: Mapping[str, str] | None = None) -> int:
        """Take the root for a new start of the job; for ``left``, see `DurableSide.claim`."""
        start, job = uuid.uuid4().hex, self._context.config.job
        self._context.place.job = f"{job}/{start}" if job else start
        self._durable.retire()  # its claim is of an earlier attempt at this, and so of another job
        with self.timed("load"):
            return self._durable.claim(left or {})

    def _from_root(self, generation: int) -> Agreement:
        place, memory = self._context.place, self._memory
        with self.timed("load"):
            stored = self._durable.load()
        if stored is None and memory.newest is None:
            raise RecoveryError(
                "no commit is left: the last one was interrupted on all ranks, and none is durable"
            )
        if stored is None:
            self._own.random.draw_seed()
            return Agreement(memory.capture(CommitId(generation, 0)), "initial", place.job)
        heartbeat.notify(loaded=stored.id.name)
        where = f"{self._durable.root}/{stored.id}"
        if stored.finished and self._context.config.reopen:
            stored = dataclasses.replace(stored, finished=False)
            facts = {"generation": stored.id.generation, "commit": stored.id.commit}
            self._context.events.emit("reopened", reports.reopened(stored.id), **facts)
        return Agreement(self._resumed(stored, generation, where), "durable", place.job, stored.id.name)

    def _resumed(self, stored: Snapshot, generation: int, where: str) -> Snapshot:
        """Load a commit of an earlier start under this one's generation; return it as all ranks get it."""
        self._companions.resuming(stored, where)
        resumed = {each.key: each.resumed(stored.state.get(each.key)) for each in self._companions.kept}
        state = {**stored.state, **{key: value for key, value in resumed.items() if value is not None}}
        stored = dataclasses.replace(stored, id=CommitId(generation, stored.id.commit), state=state)
        if self._load(stored, strict=self._durable.strict, where=where):
            return stored
        # It fits in part, and is completed by what this rank has, so that all ranks get the same.
        self._own.keep(stored)
        present = self._memory.capture(stored.id, finished=stored.finished)
        state = {**present.state, "random": stored.state["random"]}
        return dataclasses.replace(present, state=state, world_size=stored.world_size)

    def _adopt(self, agreement: Agreement) -> None:
        snapshot = agreement.snapshot
        self._memory.adopt(snapshot)
        self._context.place.job = agreement.job
        self._place_samplers()
        self._durable.agreed()
        resized = snapshot.world_size != self._context.world.size()
        if agreement.source in ("near", "durable") and resized and self.reset_callbacks:
            self.reset()
            self._own.keep(snapshot)
            self._memory.capture(snapshot.id, finished=snapshot.finished)
        # What is in memory has just been loaded, or sent.
        self._memory.objection = self._companions.objection(committing=False)
        self._memory.resume(snapshot, load=agreement.source != "initial")

    @property
    def _among_ranks(self) -> Strict:
        """Return which attributes must fit a commit of this job, so that all ranks have the same."""
        return True if self._durable.strict else "components"

    def _load(self, snapshot: Snapshot, *, strict: Strict, where: str | None = None) -> bool:
        """Load a commit; return whether all of it did fit."""
        where = where or f"commit {snapshot.id}"
        differences = self._memory.load(snapshot, where, strict=strict)
        for line in differences:
            message = f"not loaded from {where}: {line}"
            self._context.announce("not_loaded", message, level=logging.WARNING, what=line)
        return not differences

    def _place_samplers(self) -> None:
        self._context.contents.place(self._context.world.rank(), self._context.world.size())

    # -- exchanges -------------------------------------------------------------------------------------

    def send(self, moment: Moment) -> Hear:
        """Send the other ranks what this one knows.

        Returns:
            A function that waits for all ranks, and returns the error that all are to raise. If a commit
            fails before the function is called, the next commit gets the same function: the others may have
            heard these numbers already, and this rank retries that commit.
        """
        if moment.kind == "check":
            self.catch_up(retried=False)
        if self._unheard is not None:
            return self._unheard
        world = self._context.world
        sent = self._companions.send(world, moment)

        def hear() -> BaseException | None:
            self._unheard = None
            verdict = self._companions.verdict(moment, sent()[1:])
            if moment.kind == "check" and verdict is not None and self._keeps_all(verdict):
                self._rank.own.gather(world, self._context.place.carried)  # all are there; a commit follows
            return verdict

        self._unheard, self._unheard_at = hear, self._position()
        return hear

    def _position(self) -> tuple[Mapping[str, tuple[int, int]], int]:
        """Return where the samplers are, and how many steps this process has done since its last commit."""
        return self._context.contents.positions(), heartbeat.steps()

    def catch_up(self, *, retried: bool | None = None) -> None:
        """Raise what the ranks decided at a commit that failed on this rank only, and was not retried here.

        Ranks that want to leave or join ask again, so that decision is dropped.

        Args:
            retried: whether this rank retries that commit now; None if it does unless a sampler has moved or
                an optimizer has made a step.
        """
        if self._unheard is None:
            return
        if retried is None:
            retried = self._unheard_at == self._position()
        if not retried:
            verdict = self._unheard()
            if verdict is not None and not self._keeps_all(verdict):
                raise verdict

    def _keeps_all(self, verdict: BaseException) -> bool:
        """Return whether ranks come or go, and nothing is lost."""
        return isinstance(verdict, Departure) or fault_of(verdict, self._context.world) == "hosts"

    def iteration_begins(self) -> None:
        """If an iterator is made right at a commit, restore the random streams.

        A data loader draws from the global generator when its iterator is made. An undisturbed run made it
        before the commit, a resumed one makes it after.
        """
        if not self._context.place.joined:
            return
        if self._memory.newest is not None and self._memory.is_at_commit():
            self._memory.resume_streams(self._memory.newest)
        for name, order in self._context.contents.orders.items():
            if order.padding or order.dropped:
                facts: dict[str, Any] = order.tail_report()
                self._context.events.emit("tail", sampler=name, **facts)

    # -- rollbacks -------------------------------------------------------------------------------------

    def roll_back(self) -> None:
        """Return to the newest commit in this rank's memory.

        Raises:
            RecoveryError: a commit was interrupted while it was being made, so memory holds none.
        """
        self._memory.resume(self.reload())

    def reload(self) -> Snapshot:
        """Load the newest commit again; rank-local state stays as it is.

        Raises:
            RecoveryError: as in `roll_back`.
        """
        if self._memory.newest is None:
            raise RecoveryError("memory holds no commit: the last one was interrupted; sync() fetches one")
        self._load(self._memory.newest, strict=self._among_ranks)
        self._companions.notify(Observer.rolled_back)
        return self._memory.newest

    def skip(self, batch: RolledBack) -> None:
        """Roll back, and leave a bad batch out of the rest of its epoch."""
        self.roll_back()
        if batch.order is not None:
            batch.order.leave_out(batch.samples)

    def cause(self, error: BaseException) -> BaseException:
        """Return the error that ended the training function, before a framework or Horovod changed it."""
        error = self._context.framework.original(error) or error
        return mistake_of(error) or error

    # -- reports ---------------------------------------------------------------------------------------

    def _report(
        self, agreement: Agreement, started: float, reached: tuple[int, int], claimed: Claimed | None
    ) -> None:
        """Report the end of a recovery."""
        seconds, size = self._context.clock.monotonic() - started, self._context.world.size()
        commit = agreement.snapshot.id
        near = "" if claimed is None else claimed.describe()
        message = reports.agreed(agreement, size, self._durable.root, seconds, reached, near=near)
        facts: dict[str, Any] = {"generation": commit.generation, "commit": commit.commit}
        self._context.announce("sync", message, source=agreement.source, **facts, size=size, seconds=seconds)
        self._rank.timings.add("sync", seconds - self._rank.timings.spent("load"))
