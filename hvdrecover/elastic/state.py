"""The state of a training job: committed, rolled back, handed to new ranks and made durable."""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from hvdrecover import config as configs
from hvdrecover import errors, heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.retrying import ATTEMPTS, retrying
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import redact
from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.elastic import recovery, reports, stalls, stopping
from hvdrecover.elastic.consultation import Consultation
from hvdrecover.elastic.contents import Contents, Present
from hvdrecover.elastic.durability import FINISH_ATTEMPTS, Durability
from hvdrecover.elastic.guard.judge import RolledBack
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.guard.watch import Watch
from hvdrecover.elastic.horovod import hosts_updated
from hvdrecover.elastic.interfaces import Framework, World
from hvdrecover.elastic.memory import Memory
from hvdrecover.elastic.pacing import Pacing
from hvdrecover.elastic.randomness import Generators, Randomness
from hvdrecover.elastic.recovery import Agreement, Source
from hvdrecover.elastic.scalars.observed import Observed
from hvdrecover.elastic.scalars.scalars import NoScalars, Scalars
from hvdrecover.elastic.timings import Timings
from hvdrecover.elastic.witness import Witness, drilled
from hvdrecover.errors import HvdrecoverError, RecoveryError
from hvdrecover.events import Events
from hvdrecover.version import __version__

SETTLE_SECONDS = 30.0  # how long a training function that failed waits for the write in flight


class State:
    """Everything that a job must not lose.

    Attributes given by name become attributes of the state. Models, optimizers and whatever else has
    ``state_dict`` and ``load_state_dict`` are tracked in place, elastic samplers give their cursor, and all
    other values are plain objects that JSON must be able to hold (`hvdrecover.checkpoint.values`).

    Args:
        framework: facts about the framework.
        world: the ranks.
        checkpoint: a `Checkpoint`, or just its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that
            nothing is written.
        rng: ``"reseed"`` seeds all global generators anew at every commit, which makes a resumed run equal to
            an undisturbed one; ``"store"`` leaves them alone and stores their states instead.
        guard: what is watched about the ranks; None watches nothing.
        tensorboard: path or URL of the folder for TensorBoard's runs, one for each rank; None writes none.
        config: the process's settings.
        clock: where times come from.
        attributes: what to track.

    Raises:
        ConfigError: a setting has no usable value, or an attribute's name is taken.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.

    After a recovery all ranks have one rank's copy of every attribute. What a rank has of its own, such as a
    running loss or batch norm's statistics, becomes another rank's; a `Guard` warns of it.
    """

    _contents: Contents

    def __init__(
        self,
        framework: Framework,
        world: World,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness = "reseed",
        guard: Guard | None = None,
        tensorboard: str | None = None,
        config: configs.Config | None = None,
        clock: Clock = SYSTEM_CLOCK,
        attributes: dict[str, Any],
    ) -> None:
        self._config = config or configs.read()
        root = checkpoint or self._config.checkpoint
        self._settings = root if isinstance(root, Checkpoint) or root is None else Checkpoint(root)
        if self._config.drill is not None:
            self._settings, tensorboard = drilled(self._config, self._settings), None
        self._world = world
        self._clock = clock
        self._random = Generators(framework, rng)
        self._job = ""
        self._events = Events(self._config.events, self._config.host, clock)
        self._timings = Timings(clock)
        self._pacing = Pacing(clock, on=self._settings is not None and self._settings.every == "auto")
        self._consultation = Consultation(self._config)
        self._reset_callbacks: list[Callable[[], None]] = []
        self._durability: Durability | None = None
        self._contents = Contents(framework, attributes, set(dir(type(self))), self._iteration_begins)
        dataset = guard.data.as_json() if guard is not None and guard.data is not None else None
        versions = {**framework.versions(), "hvdrecover": __version__}
        self._memory = Memory(self._contents, versions, dataset)
        self._watch = Watch(guard, framework, world, self._contents, self._events, self._config.host)
        self._observed = Observed(framework)
        self._scalars: Scalars | NoScalars = NoScalars()
        if tensorboard is not None:
            self._scalars = Scalars(tensorboard, framework, self._contents, clock)
        self._witness: Witness | None = None
        if self._config.drill is not None:
            self._witness = Witness(self._config, self._contents, world, clock)
            self._contents.on_record = self._witness.recorded
        self._capture(CommitId(0, 0))

    # -- attributes ------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found otherwise, so tracked attributes live in one place.
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents.values:
            return contents.values[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        contents = self.__dict__.get("_contents")
        if contents is not None and name in contents.values:
            contents.put(name, value)
        else:
            object.__setattr__(self, name, value)

    @property
    def last_commit(self) -> CommitId:
        """The newest commit in this rank's memory; generation 0 before the first `sync`."""
        return self._memory.newest.id if self._memory.newest else CommitId(0, 0)

    @property
    def last_durable(self) -> CommitId | None:
        """The newest commit that this rank has made durable; None on all ranks but 0."""
        return self._durability.writer.progress.last_durable if self._durability else None

    @property
    def finished(self) -> bool:
        """Whether the run's training function has returned, in this start or an earlier one."""
        return self._memory.newest is not None and self._memory.newest.finished

    def observe(self, loss: Any = None, **others: Any) -> None:
        """Tell scalars of a step, best right after it: a line of each in TensorBoard, if that is asked for.

        Args:
            loss: this rank's, a number or a tensor of one; no device is waited for.
            others: more of them, by name.

        Raises:
            ConfigError: a value is no number.
        """
        taken = self._observed.take({"loss": loss, **others})
        self._scalars.observe(taken)
        if self._witness is not None and "loss" in taken:
            self._witness.observed(float(taken["loss"]))

    # -- Horovod's verbs -------------------------------------------------------------------------------

    def commit(self, durable: bool = False) -> None:
        """Make a point that the job can go back to; then see whether hosts have come or gone.

        Args:
            durable: make this very commit durable, even if none is due. It is written in the background;
                `flush` waits for it. If an attempt to write an earlier one is under way, that is waited for.

        Raises:
            HostsUpdatedInterrupt: hosts have come or gone; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            UnsupportedValueError: a plain object that JSON can't hold.
            CheckpointError: as in `check_host_updates`.
            DivergedError: the ranks' parameters differ, and the state's guard is to raise it.
            NumericsError: parameters are not finite, and the state's guard is to raise it.
        """
        self._scalars.committing()
        self._gather()
        judge = self._watch.judge
        losses = self._observed.take_not_finite()
        not_finite = judge.not_finite(losses) if judge is not None else []
        if not_finite:
            self._memory.pass_over()  # what can't be gone on from is no commit
        else:
            self._save(bad=())
        if self._watch.compare(self._memory):
            self.restore()  # another rank's tensors have taken the place of this one's
        stalls.follow(self._world)
        if not not_finite and self._memory.newest is not None and (durability := self._durable_side()):
            durability.offer(self._memory.newest, ask=durable)
        self._consult(committed=not not_finite, not_finite=not_finite, busy=self._scalars.busy())
        self._scalars.committed(self._durability.writer.progress.age if self._durability else None)

    def save(self) -> None:
        """Make a commit in this rank's memory only, without a word to the others."""
        self._save(self._bad_parameters())

    def _save(self, bad: Sequence[str]) -> None:
        started = self._clock.monotonic()
        # Counted from the last attempt: the other ranks count one that was interrupted here as well.
        last = self._memory.attempt
        commit = CommitId(last.generation, last.commit + 1)
        present = self._contents.take_apart()
        unchanged = self._memory.is_unchanged(present)
        if not unchanged:
            self._random.number += 1
        snapshot = self._capture(commit, present, unchanged=unchanged)
        snapshot.bad = tuple(bad)
        if self._joined:
            self._random.committed(snapshot.state["random"], commit.commit, self._world.rank())
        stall = self._clock.monotonic() - started
        if self._witness is not None:
            self._witness.committing(snapshot)
        heartbeat.committed(commit.generation, commit.commit, self._random.number)
        self._events.emit("commit", generation=commit.generation, commit=commit.commit, stall=stall)

    def restore(self) -> None:
        """Go back to the newest commit in this rank's memory.

        Raises:
            RecoveryError: a commit was interrupted while it was being made, so memory holds none.
        """
        if self._memory.newest is None:
            raise RecoveryError("memory holds no commit: the last one was interrupted; sync() fetches one")
        self._load(self._memory.newest, strict=True)

    def sync(self) -> None:
        """Bring all ranks to one commit; see `agree`."""
        self.agree()

    def agree(self, reached: tuple[int, int] = (0, 0)) -> Source:
        """Bring all ranks to one commit: the newest in anybody's memory, else the newest durable one.

        The rank that holds it sends its present state under that commit's number. If there is no commit at
        all, rank 0 sends its initial state.

        Args:
            reached: how far the job had come before, for the line that says what is repeated.

        Returns:
            Where the state came from.

        Raises:
            CheckpointError: rank 0 could not load a durable commit.
            RecoveryError: the same, on the other ranks.
            StructureError: the ranks were not started with the same, and the state has a guard.
            DivergedError: memories hold one commit with different parameters, and the guard is to raise it.
        """
        started = self._clock.monotonic()
        self._events.rank = self._world.rank()
        heartbeat.take_rank(self._world.rank())
        held = self._memory.newest
        ballot = self._watch.ballot(held)
        election = recovery.publish(self._world, held.id if held else None, self._watch.told, ballot)
        self._watch.meet(election, held)
        if self._world.rank() == election.root:
            agreement = self._lead(election)
        else:
            same = held if held is not None and held.id == election.newest else None
            agreement = recovery.receive(self._world, election.root, same)
            if agreement.source == "initial" or (agreement.source == "memory" and same is not None):
                sent = agreement.snapshot.state["random"]
                agreement.snapshot.state["random"] = self._random.kept(sent, self._world.rank())
            self._job = agreement.job
            self._load(agreement.snapshot, strict=True)
        self._adopt(agreement)
        self._agreed(agreement, started, reached)
        if self._witness is not None:
            self._witness.agreed(agreement.snapshot, agreement.source)
        self._scalars.begin(self._world.rank())
        return agreement.source

    def check_host_updates(self) -> None:
        """See whether hosts have come or gone, and whether the job must stop; all ranks find the same.

        Raises:
            HostsUpdatedInterrupt: they have; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            FencedError: another job has taken the checkpoint root.
            DurableAgeError: commits can't be made durable for longer than ``HVDRECOVER_MAX_DURABLE_AGE``.
            StoppedError: rank 0 has met one of these; raised on the other ranks.
        """
        self._consult(committed=False)

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call whenever the ranks have met again, before they agree on a state.

        They are also called when a durable commit is resumed with another number of ranks.
        """
        self._reset_callbacks.extend(callbacks)

    def on_hosts_updated(self, timestamp: float, update: int) -> None:
        """Called by Horovod, on a thread of its own, when hosts have come (2) or gone (1)."""
        self._consultation.note_hosts(int(update))

    def verdict_on(self, error: BaseException) -> BaseException:
        """What an error that ended the training function was before a framework has made it another."""
        verdict = self._watch.judge.take_verdict() if self._watch.judge is not None else None
        return verdict or error

    def leave_out(self, batch: RolledBack) -> None:
        """Go back to the last commit, and never see a bad batch again in this epoch; called by `run`."""
        order = self._contents.order_in_use()
        done = order.done if order is not None else 0
        self.restore()
        self._observed.take_not_finite()  # that of the bad batch
        if order is not None and batch.batch_size:
            order.leave_out(done, batch.batch_size)

    def meet_again(self, reason: BaseException, steps: int = 0) -> None:
        """Part from the other ranks and meet those that are there; called by `run` after a fault.

        Args:
            reason: the fault.
            steps: how many steps this rank has rolled back for it.

        Raises:
            MeetingError: a rank was lost while they met.
            RemovedError: this host is no longer part of the job.
        """
        self._events.emit("reset", reason=f"{type(reason).__name__}: {reason}", steps=steps)
        with self._timings.of("reset"):
            self._world.shutdown()
        self._consultation.take_hosts()  # the meeting takes note of all changes so far, and of none after it
        with self._timings.of("rendezvous"):
            self._world.init()
        stalls.forget()

    def on_reset(self) -> None:
        """Called by `run` when the ranks have met again."""
        self._place_samplers()
        for callback in self._reset_callbacks:
            callback()

    # -- durability ------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest commit is durable; on ranks other than 0 there is nothing to wait for.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.

        Raises:
            FlushTimeoutError: the time is over; the write goes on.
            StorageError: a handful of attempts have failed; the writer goes on trying.
            FencedError: another job has taken the checkpoint root.
            NumericsError: the newest commit has parameters that are not finite, and the state has a guard.
        """
        with stalls.paused():
            self._flush(timeout, ATTEMPTS)

    def finish(self) -> None:
        """Mark the run finished with a last durable commit; returns when it is durable, on all ranks.

        Storage that fails is given several minutes to come back, many more than by `flush`.

        Raises:
            CheckpointError: it could not be made durable.
            RecoveryError: the same, on ranks other than 0.
        """
        self._scalars.close()
        if self._settings is None:
            return
        if not self.finished:
            self._gather()
            self.save()
            if self._memory.newest is not None:
                self._memory.newest.finished = True
        self._make_durable(FINISH_ATTEMPTS)
        self.settle()
        self._say_finished(reports.finished(self.last_commit, self._root()))

    def reopen(self) -> None:
        """A training function is called on a state that an earlier one of this process has finished."""
        if self._memory.newest is not None:
            self._memory.newest.finished = False

    def say_finished(self) -> None:
        """Tell the user that there is nothing left to do."""
        self._say_finished(reports.finished_before(self.last_commit))

    def settle(self) -> None:
        """Let the write in flight come to an end, and deletions after it; when a training function ends."""
        if self._durability is not None:
            self._durability.settle(SETTLE_SECONDS)

    def _flush(self, timeout: float | None, attempts: int) -> None:
        newest = self._memory.newest
        if newest is not None and (durability := self._durable_side()) is not None:
            if newest.bad and self._watch.judge is not None:
                raise self._watch.judge.unfit(newest.bad)
            durability.flush(newest, timeout, attempts)

    def _bad_parameters(self) -> list[str]:
        """Return which trained parameters are not finite, if a guard looks at that."""
        return self._watch.judge.bad_parameters() if self._watch.judge is not None else []

    def _make_durable(self, attempts: int) -> None:
        """Make the newest commit durable, and return when all ranks know that it is.

        Raises:
            CheckpointError: it could not be made durable.
            RecoveryError: the same, on ranks other than 0.
        """
        failure: HvdrecoverError | None = None
        with stalls.paused():
            try:
                self._flush(None, attempts)
            except HvdrecoverError as error:
                failure = error
            table = self._world.allgather([errors.number(failure)], "hvdrecover.finish")
        if failure is not None:
            raise failure
        if failed := int(table.max()):
            raise reports.stopped(errors.name(failed), "could not make the last commit durable")

    def _gather(self) -> None:
        """Before a commit that may become durable: learn what only the other ranks know."""
        if self._settings is not None and self._world.size() > 1:
            self._random.gather(self._world)

    # -- what the ranks tell each other ---------------------------------------------------------------

    def _consult(self, *, committed: bool, not_finite: Sequence[str] = (), busy: int = 0) -> None:
        verdict = self._durability.verdict() if self._durability else None
        outcome = self._consultation.hold(
            self._world,
            failed=errors.number(verdict),
            not_finite=bool(not_finite),
            missing=self._watch.missing.digest,
            busy=busy,
        )
        self._watch.missing.compare(alike=outcome.alike)
        self._scalars.compare(outcome.busy)
        if verdict is not None:
            raise verdict
        if outcome.failed:
            # If rank 0 left alone, the others would take it for lost and go on without it.
            raise reports.stopped(errors.name(outcome.failed), "has stopped the job")
        if outcome.not_finite and self._watch.judge is not None:
            self._watch.judge.parameters(not_finite)
        leaving = outcome.leaving
        if leaving.any and not committed:
            self.save()
        if leaving.leaving[self._world.rank()]:
            self._leave(whole=leaving.whole)
        if leaving.any or outcome.hosts_updated:
            raise hosts_updated()

    def _leave(self, *, whole: bool) -> NoReturn:
        """Leave at a commit that all ranks have made; if all leave, it is made durable first."""
        if whole and self._settings is not None:
            self._make_durable(ATTEMPTS)
        commit, scope = self.last_commit, "job" if whole else "host"
        heartbeat.tell(left=scope)
        heartbeat.enter(heartbeat.Phase.LEFT)
        message = reports.leaving(commit, self._root(), whole=whole)
        facts: dict[str, Any] = {"scope": scope, "generation": commit.generation, "commit": commit.commit}
        self._events.emit("leave", message if not whole or self._world.rank() == 0 else None, **facts)
        raise stopping.Preempted()

    # -- inside ----------------------------------------------------------------------------------------

    @property
    def _joined(self) -> bool:
        """Whether this rank has agreed on a state with the others; it can be made before they have met."""
        return self._job != ""

    def _capture(
        self,
        commit: CommitId,
        present: Present | None = None,
        *,
        finished: bool = False,
        unchanged: bool = False,
    ) -> Snapshot:
        """Copy the present state into memory under a commit's identity."""
        rank, size = (self._world.rank(), self._world.size()) if self._joined else (0, 1)
        in_flight = self._durability.writer.in_flight if self._durability else None
        snapshot = self._memory.capture(
            commit,
            present or self._contents.take_apart(),
            self._random.capture(rank),
            size,
            in_flight=in_flight,
            finished=finished,
            unchanged=unchanged,
        )
        snapshot.state.update(self._scalars.state())
        snapshot.state.update(self._pacing.state())
        return snapshot

    def _load(self, snapshot: Snapshot, *, strict: bool, where: str | None = None) -> bool:
        """Load a commit; return whether all of it did fit."""
        where = where or f"commit {snapshot.id}"
        differences = self._contents.load(snapshot.state, snapshot.arenas, where, strict=strict)
        for line in differences:
            self._announce("not_loaded", f"not loaded from {where}: {line}", level=logging.WARNING, what=line)
        self._scalars.load(snapshot.state)
        self._pacing.load(snapshot.state)
        self._memory.mark()
        if self._joined:
            self._place_samplers()
            self._resume_randomness(snapshot)
        return not differences

    def _lead(self, election: recovery.Election) -> Agreement:
        """On the root: decide what all go on from, and send it."""
        try:
            agreement = self._choose(election)
        except Exception as error:
            recovery.send_failure(self._world, election.root, error)
            raise
        recovery.send(self._world, election.root, agreement)
        return agreement

    def _choose(self, election: recovery.Election) -> Agreement:
        if election.newest is not None:
            # A new generation: a rank left behind may hold, or be writing, another commit of this number.
            newest = CommitId(election.newest.generation + 1, election.newest.commit)
            return Agreement(self._capture(newest, finished=self.finished), "memory", self._job)
        start = uuid.uuid4().hex
        self._job = f"{self._config.job}/{start}" if self._config.job else start
        generation, stored = 1, None
        self._retire_writer()  # that of an earlier attempt at this belongs to another job
        if (durability := retrying(self._clock)(self._durable_side)) is not None:
            with self._timings.of("load"):
                generation = retrying(self._clock)(durability.store.claim_next, again=self._config.again)
                stored = load_newest(durability.store, self._config.suspects)
        if stored is None and self._memory.newest is None:
            raise RecoveryError(
                "no commit is left: the last one was interrupted on all ranks, and none is durable"
            )
        if stored is None:
            self._random.draw_seed()
            return Agreement(self._capture(CommitId(generation, 0)), "initial", self._job)
        where = f"{self._root()}/{stored.id}"
        heartbeat.tell(loaded=stored.id.name)
        self._watch.compare_data(stored, where)
        stored.id = CommitId(generation, stored.id.commit)
        stored.state.update(self._pacing.resumed(stored.state))
        if not self._load(stored, strict=self._strict, where=where):
            stored = self._completed(stored)
        return Agreement(stored, "durable", self._job)

    def _completed(self, stored: Snapshot) -> Snapshot:
        """A commit that fits in part, completed by what this rank has, so that all ranks get the same."""
        present = self._capture(stored.id, finished=stored.finished)
        state = {**present.state, "random": stored.state["random"]}
        return dataclasses.replace(present, state=state, world_size=stored.world_size)

    def _adopt(self, agreement: Agreement) -> None:
        self._memory.adopt(agreement.snapshot)
        self._job = agreement.job
        self._place_samplers()
        if self._world.rank() != 0:
            self._retire_writer()
        elif self._durability is not None:
            self._durability.writer.progress.reinstate()
        resized = agreement.snapshot.world_size != self._world.size()
        if agreement.source == "durable" and resized and self._reset_callbacks:
            self.on_reset()
            self._capture(agreement.snapshot.id, finished=agreement.snapshot.finished)
        if self._memory.newest is not None:  # whose parameters have just been loaded, or sent
            self._memory.newest.bad = tuple(self._bad_parameters())
        self._resume_randomness(agreement.snapshot)

    def _resume_randomness(self, snapshot: Snapshot) -> None:
        self._random.resume(snapshot.state["random"], snapshot.id.commit, self._world.rank())

    def _iteration_begins(self) -> None:
        """Right at a commit, making an iterator must not move the streams.

        A data loader draws from the global generator when its iterator is made. An undisturbed run made it
        before the commit, a resumed one makes it after.
        """
        if self._joined and self._memory.newest is not None and self._memory.is_at_commit():
            self._resume_randomness(self._memory.newest)
        for name, order in self._contents.orders.items():
            if self._joined and (order.padding or order.dropped):
                facts: dict[str, Any] = order.tail_report()
                self._events.emit("tail", sampler=name, **facts)

    def _retire_writer(self) -> None:
        if self._durability is not None:
            self._durability.writer.stop()
            if (snapshot := self._durability.writer.in_flight) is not None:
                self._memory.abandon(snapshot)
            self._durability = None

    def _durable_side(self) -> Durability | None:
        """What makes commits durable, on the rank that does; None on the others."""
        if self._settings is None or not self._joined or self._world.rank() != 0:
            return None
        if self._durability is None:
            self._durability = Durability.at(
                self._settings,
                job=self._job,
                host=self._config.host,
                rank=self._world.rank(),
                events=self._events,
                clock=self._clock,
                pacing=self._pacing,
                max_age=self._config.max_durable_age,
            )
        return self._durability

    @property
    def _strict(self) -> bool:
        return self._settings is None or self._settings.strict

    def _root(self) -> str:
        return redact(self._settings.url) if self._settings else ""

    def _place_samplers(self) -> None:
        for order in self._contents.orders.values():
            order.place(self._world.rank(), self._world.size())

    # -- reports ---------------------------------------------------------------------------------------

    def _announce(self, kind: str, message: str, *, level: int = logging.INFO, **facts: Any) -> None:
        """An event on every rank; a line on the terminal from rank 0 only."""
        self._events.emit(kind, message if self._world.rank() == 0 else None, level=level, **facts)

    def _say_finished(self, message: str) -> None:
        commit = self.last_commit
        self._announce("finished", message, generation=commit.generation, commit=commit.commit)

    def _agreed(self, agreement: Agreement, started: float, reached: tuple[int, int]) -> None:
        """Note the end of a recovery, and see how long the first step after it takes."""
        ended = self._clock.monotonic()
        commit, size = agreement.snapshot.id, self._world.size()
        facts: dict[str, Any] = {"generation": commit.generation, "commit": commit.commit}
        message = reports.agreed(agreement, size, self._root(), ended - started, reached)
        self._announce("sync", message, source=agreement.source, **facts, size=size, seconds=ended - started)
        self._timings.add("sync", ended - started - self._timings.spent("load"))
        heartbeat.stand_at(commit.generation, commit.commit, self._random.number)
        heartbeat.resume()
        stalls.follow(self._world)

        def first_step() -> None:
            if self.last_commit.generation != commit.generation:
                return  # the ranks have met once more since then
            self._timings.add("first_step", self._clock.monotonic() - ended)
            facts.update(self._timings.take())
            if agreement.source == "durable":
                self._pacing.restored(facts["seconds"])
            self._events.emit("recovered", **facts)

        heartbeat.at_progress(first_step)
