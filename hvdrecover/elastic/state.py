"""The state of a training job, as its script sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hvdrecover import config as configs
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.elastic.assembly import assemble, settings_of
from hvdrecover.elastic.attributes import Attributes, Yielding, divide, is_ours, kept_elsewhere
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.commits.randomness import Randomness
from hvdrecover.elastic.companions import Companions, Moment, Observer
from hvdrecover.elastic.context import Context, Place
from hvdrecover.elastic.ends import Ends
from hvdrecover.elastic.horovod import rank as horovod_rank
from hvdrecover.elastic.interfaces import Framework, HiddenAttribute, World
from hvdrecover.elastic.lifecycle import stalls
from hvdrecover.elastic.lifecycle.leaving import Departure
from hvdrecover.elastic.ranks import Ranks
from hvdrecover.elastic.recovery import Recovery
from hvdrecover.elastic.scalars.scalars import as_numbers
from hvdrecover.elastic.scalars.trackers import Tracker
from hvdrecover.errors import HvdrecoverError
from hvdrecover.events import of_training
from hvdrecover.guard.settings import Guard


class State(Attributes):
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
            an undisturbed one; ``"store"`` leaves them alone and stores their states instead. None takes the
            class's default.
        guard: what is compared between the ranks; None compares nothing.
        tensorboard: path or URL of the folder for TensorBoard's runs, one for each rank; None writes none.
        tracker: an experiment tracker, to which rank 0 reports; None reports to none.
        config: the process's settings.
        clock: where times come from.
        companions: the adapter's own.
        hidden: attributes that the adapter adds, by names that begin with an underscore.
        virtual: the virtual ranks; None if the job has none.
        attributes: what to track.

    Raises:
        ConfigError: a setting has no usable value, or an attribute's name is taken.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.

    After a recovery all ranks have one rank's copy of every attribute. What a rank has of its own, such as a
    running loss or batch norm's statistics, becomes another rank's; a `Guard` warns of it.

    A script's attributes may have the names that this class adds to Horovod's, and those of its keywords if
    the value is not one for the keyword: they are tracked as any others, and ours make way.

    A subclass may have its own `save`, `restore`, `sync` and `reset`. They are called where Horovod would
    call them, but `restore` after the rendezvous, and ``super()`` does ours there. What they keep by
    themselves is not part of a commit.
    """

    _rng: Randomness = "reseed"  # what becomes of random generators if the script says nothing

    def __init__(
        self,
        framework: Framework,
        world: World,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness | None = None,
        guard: Guard | None = None,
        tensorboard: str | None = None,
        tracker: Tracker | None = None,
        config: configs.Config | None = None,
        clock: Clock = SYSTEM_CLOCK,
        companions: Companions | None = None,
        hidden: Mapping[str, HiddenAttribute] | None = None,
        virtual: Ranks | None = None,
        attributes: dict[str, Any],
    ) -> None:
        config = config or configs.read()
        keywords, others = divide(
            checkpoint=checkpoint, rng=rng, guard=guard, tensorboard=tensorboard, tracker=tracker
        )
        attributes = {**attributes, **others}
        reserved, ranks = self._begin(attributes, State), virtual or Ranks()
        self._contents = Contents(
            framework, attributes, reserved, lambda: self._recovery.iteration_begins(), hidden, ranks
        )
        events, place = of_training(config, clock), Place(world, ranks)
        events.rank = horovod_rank()
        self._context = Context(framework, world, self._contents, config, events, clock, place, ranks)
        rank = assemble(
            self._context,
            settings=settings_of(keywords["checkpoint"], config),
            rng=ranks.rng(keywords["rng"], type(self)._rng),
            guard=keywords["guard"],
            tensorboard=keywords["tensorboard"] and configs.absolute(keywords["tensorboard"]),
            tracker=keywords["tracker"],
            others=companions or Companions(),
        )
        self._memory, self._durable, self._own = rank.memory, rank.durable, rank.own
        self._hosts, self._companions = rank.hosts, rank.companions
        self._recovery, self._ends = Recovery(rank), Ends(rank)
        self._memory.capture(CommitId(0, 0))
        self._companions.attach()
        if type(self).reset is not State.reset:
            self._recovery.reset_callbacks.append(self.reset)
        self._make_way()

    # -- attributes ------------------------------------------------------------------------------------

    @Yielding
    def last_commit(self) -> CommitId:
        """The newest commit in this rank's memory; generation 0 before the first `sync`."""
        return self._memory.last

    @Yielding
    def last_durable(self) -> CommitId | None:
        """The newest commit that this rank has made durable; None on all ranks but 0."""
        return self._durable.last_durable

    @Yielding
    def finished(self) -> bool:
        """Return whether the run's training function has returned, in this start or an earlier one."""
        return self._memory.finished

    def log_metrics(self, loss: Any = None, **others: Any) -> None:
        """Report numbers of a step, best right after it: a line of each in TensorBoard, if that is asked for.

        Args:
            loss: this rank's, a number or a tensor of one; no device is waited for.
            others: more of them, by name.

        Raises:
            ConfigError: a value is not a number.
        """
        if self._context.ranks.replaying:
            return  # its process reports it
        values = as_numbers(self._context.framework, {"loss": loss, **others})
        self._companions.notify(Observer.observed, values)

    # -- commits ---------------------------------------------------------------------------------------

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
        self._companions.notify(Observer.begins)
        objection = self._companions.objection(committing=True)
        self._recovery.catch_up()
        self._own.gather(self._context.world, self._context.place.carried)
        # What the ranks tell each other travels while they copy. A write that is waited for may add to it.
        verdict = None if durable else self._recovery.send(Moment("commit"))
        if objection is None:
            self._around("save", lambda: self._save(None))
        else:
            self._memory.pass_over()  # a state that can't be resumed from is not a commit
        if self._companions.inspect(self._memory):
            # Another rank's tensors have taken the place of this one's.
            self._around("restore", self._recovery.reload)
        if objection is None:
            self._durable.offer(ask=durable)
        self._act(verdict or self._recovery.send(Moment("commit")))
        self._own.forget()
        self._companions.notify(Observer.committed)

    def save(self) -> None:
        """Make a commit in this rank's memory only, without a word to the others."""
        self._due.pop("save", self._keep_alone)()

    def restore(self) -> None:
        """Return to the newest commit in this rank's memory.

        Raises:
            RecoveryError: a commit was interrupted while it was being made, so memory holds none.
        """
        self._due.pop("restore", self._recovery.roll_back)()

    def sync(self) -> None:
        """Bring all ranks to one commit; see `hvdrecover.elastic.recovery.Recovery.agree`."""
        self._due.pop("sync", self._recovery.agree)()

    def check_host_updates(self) -> None:
        """See whether hosts have come or gone, and whether the job must stop; all ranks find the same.

        Raises:
            HostsUpdatedInterrupt: they have; `run` handles it.
            Preempted: this process leaves; its exit code is 75.
            FencedError: another job has taken the checkpoint root.
            DurableAgeError: commits can't be made durable for longer than ``HVDRECOVER_MAX_DURABLE_AGE``.
            StoppedError: rank 0 has had one of these; raised on the other ranks.
        """
        self._act(self._recovery.send(Moment("check")), between=True)

    def flush(self, timeout: float | None = None) -> None:
        """Wait until the newest commit is durable; on ranks other than 0 there is nothing to wait for.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.

        Raises:
            FlushTimeoutError: the time is over; the write continues.
            StorageError: a handful of attempts have failed; the writer continues trying.
            FencedError: another job has taken the checkpoint root.
            NumericsError: the newest commit has parameters that are not finite, and the state has a guard.
        """
        with stalls.paused():
            self._durable.flush(timeout)

    def finish(self) -> None:
        """Mark the run finished with a last durable commit; returns when it is durable, on all ranks.

        Storage that fails is given several minutes to come back, many more than by `flush`.

        Raises:
            CheckpointError: it could not be made durable.
            RecoveryError: the same, on ranks other than 0.
        """
        self._companions.notify(Observer.closing)
        if self._durable.wanted:
            if not self._memory.finished:
                self._own.gather(self._context.world, self._context.place.carried)
                self._around("save", self._keep)
            self._ends.finish()

    # -- called by Horovod, or as Horovod's states have them ---------------------------------------------

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Add functions to call after each rendezvous, before the ranks agree on a state.

        They are also called when a durable commit is resumed with another number of ranks.
        """
        self._recovery.reset_callbacks.extend(callbacks)

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take Horovod's report, on a thread of its own, that hosts have come (2) or gone (1)."""
        self._hosts.note(int(update_res))

    def on_reset(self) -> None:
        """Called by `run` after each rendezvous."""
        self._recovery.reset()

    def reset(self) -> None:
        """Called before the reset callbacks; for subclasses, there is nothing to do here."""

    # -- inside ----------------------------------------------------------------------------------------

    def _leave_if_told(self) -> None:
        """Leave at the last commit, if ranks are to leave when the training function has returned.

        A signal handler of the script may have made it return early, so the run is not finished. What the
        function did after its last commit is rolled back: it may have counted an epoch that it did not train.
        """
        with stalls.paused():  # others may still be at what they do last
            verdict = self._recovery.send(Moment("check", returned=True))()
        if isinstance(verdict, Departure):
            self._around("restore", self._recovery.roll_back)
            self._ends.leave(verdict)

    def _has_hooks(self) -> bool:
        """Return whether code of the script is called between a fault and the next agreement."""
        methods = [getattr(self, name) for name in ("save", "restore", "on_reset")]
        return bool(self._recovery.reset_callbacks) or not all(map(is_ours, methods))

    def _keep(self) -> None:
        """Make a commit outside of `commit`, with what is known of the other ranks' own states."""
        self._save(self._companions.objection(committing=False))

    def _keep_alone(self) -> None:
        """Make a commit that knows nothing of the other ranks' own states."""
        self._own.forget()
        self._keep()

    def _not_durable(self) -> str | None:
        """Return a line on what durable commits lack, if a subclass keeps something by itself."""
        return kept_elsewhere(type(self)) if self._durable.wanted else None

    def _save(self, objection: HvdrecoverError | None) -> None:
        """Make a commit in memory; an objection keeps it from becoming durable."""
        started = self._context.clock.monotonic()
        snapshot = self._memory.commit()
        self._memory.objection = objection
        stall = self._context.clock.monotonic() - started
        self._companions.notify(Observer.captured, snapshot)
        self._context.events.emit("commit", **vars(snapshot.id), stall=stall)

    def _act(self, hear: Callable[[], BaseException | None], *, between: bool = False) -> None:
        """Apply the collective verdict, at a commit or between commits: leave, raise or continue."""
        verdict = hear()
        if isinstance(verdict, Departure):
            if between:
                self._around("save", self._keep)  # ranks leave at a commit
            self._ends.leave(verdict)
        if verdict is not None:
            raise verdict
