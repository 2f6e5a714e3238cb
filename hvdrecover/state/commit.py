"""The life of a commit, from the user's call to the offer to the writer; and the way back to it.

`commit` does, on every rank:

1. Ask the hooks whether the present state may become a commit. A rank with an objection skips this one.
2. Exchange rank-local state, so that each copy holds the states of all ranks.
3. Send this rank's vote. The votes travel while the tensors are copied.
4. Copy the attributes into memory (`Memory.commit`).
5. Let the hooks inspect the commit. The guard may replace this rank's tensors by another rank's.
6. Offer the commit to the writer, which writes it in the background if a durable commit is due.
7. Hear the votes of all ranks, and apply the verdict: leave, raise or continue.

The parts of one rank's state are a `Session`, with the one list of hooks. A new feature that observes, keeps
JSON in each commit, or votes is one file, and an entry in that list.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import Literal, NoReturn, TypedDict

from hvdrecover import heartbeat
from hvdrecover.checkpoint import Checkpoint
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.storage import ATTEMPTS
from hvdrecover.config import Config, absolute
from hvdrecover.errors import HvdrecoverError, RecoveryError
from hvdrecover.guard import Guard
from hvdrecover.guard.comparison import GuardHook
from hvdrecover.guard.numbers import Judge, Missing, RolledBack
from hvdrecover.scalars import Scalars, Tracker
from hvdrecover.state.contents import Strict
from hvdrecover.state.durable import FINISH_ATTEMPTS, DurableSide
from hvdrecover.state.hooks import Context, Departure, Hook, Hooks, Leaving, Moment, Preempted, Unresumed
from hvdrecover.state.horovod import fault_of, hosts_updated, limit_waits, paused
from hvdrecover.state.memory import Memory
from hvdrecover.state.rank_local import Randomness, RankLocalState
from hvdrecover.version import __version__

Part = Literal["reset", "rendezvous", "load", "sync", "first_step"]  # of a recovery


class Keywords(TypedDict, total=False):
    """The settings that each class of states takes by keyword, where they are described."""

    checkpoint: Checkpoint | str | None
    rng: Randomness | None
    guard: Guard | None
    tensorboard: str | None
    tracker: Tracker | None


class Session:
    """The parts of one rank's state, which `commit`, `rendezvous` and `run` work on."""

    def __init__(
        self,
        context: Context,
        settings: Keywords,
        rng: Randomness,
        others: Sequence[Hook],
        call: Callable[[Literal["save", "restore", "sync"], Callable[[], object]], None],
    ) -> None:
        guard, tracker = settings["guard"], settings["tracker"]
        tensorboard = settings["tensorboard"] and absolute(settings["tensorboard"])
        self.context = context
        self.call = call  # calls a method that the user's class may override, around our own work
        self.own = RankLocalState(
            context.framework, context.world, context.place, context.contents.per_rank, rng
        )
        virtual = context.ranks.join(context, self.own, guard)
        dataset = guard.data.as_json() if guard is not None and guard.data is not None else None
        versions = {**context.framework.versions(), "hvdrecover": __version__}
        self.memory = Memory(context.contents, self.own, context.place, versions, dataset)
        self.durable = DurableSide(_durable(settings["checkpoint"], context.config), context, self.memory)
        self.leaving = Leaving(context.config)
        name = context.config.instruments
        instruments = () if name is None else import_module(name).observers(context)
        self.hooks = Hooks(
            (
                *instruments,
                # It watches gradients before the judge, which may skip a step.
                *([Scalars(tensorboard, context, tracker)] if tensorboard or tracker else []),
                self.durable,
                GuardHook(guard, context),
                *([Missing(context), Judge(guard, context)] if guard is not None else []),
                Unresumed(context),
                self.leaving,
                *virtual,
                *others,
            )
        )
        self.memory.kept = self.hooks.kept
        self.reset_callbacks: list[Callable[[], None]] = []
        self.root = 0  # the source rank of the last agreement
        self.guard = guard
        # Ends the handling of stop signals: from `State.resume` to `State.finish`.
        self.end_signals: Callable[[], None] | None = None
        self.agreements = 0
        self.seconds: defaultdict[Part, float] = defaultdict(float)

    @contextmanager
    def timed(self, part: Part) -> Iterator[None]:
        """Add the time of the ``with`` block to a part of the present recovery."""
        started = self.context.clock.monotonic()
        try:
            yield
        finally:
            self.seconds[part] += self.context.clock.monotonic() - started


def _durable(checkpoint: Checkpoint | str | None, config: Config) -> Checkpoint | None:
    root = checkpoint or config.checkpoint
    settings = Checkpoint(root) if isinstance(root, str) else root
    if config.drill is not None and settings is not None and config.checkpoint is not None:
        # In a drill, the environment's root replaces the script's, so that the job's is never touched.
        settings = dataclasses.replace(settings, url=config.checkpoint)
    return settings


def commit(session: Session, *, durable: bool) -> None:
    # Rank 0 may wait for a write under way, and the others for rank 0, for as long as the storage takes.
    waits = durable or session.durable.may_wait
    if waits:
        heartbeat.progressed()  # inside, no progress is seen
    with paused() if waits else nullcontext():
        _commit(session, durable=durable)
    if durable:
        heartbeat.progressed()  # all ranks have voted after the wait, so none waits for another any more
        limit_waits(session.context.world)


def _commit(session: Session, *, durable: bool) -> None:
    hooks, memory = session.hooks, session.memory
    hooks.notify(Hook.begins)
    objection = hooks.objection(committing=True)
    session.own.gather()
    # A durable commit may wait for a write under way, and the outcome of that belongs into the vote.
    hear = None if durable else send_vote(session, Moment("commit"))
    attempt, stream = memory.attempt, session.own.stream
    try:
        if objection is None:
            session.call("save", lambda: save(session))
        else:
            memory.pass_over()
        if any(hooks.ask(Hook.inspect, memory)):
            session.call("restore", lambda: reload(session))
        if objection is None:
            session.durable.offer(ask=durable)
    except Exception as error:
        # Stay in step with the others, who count this commit and have this rank's vote: the script may catch
        # the error.
        lacks_it = memory.attempt == attempt or memory.newest is None
        if memory.attempt == attempt:
            memory.pass_over()
        verdict = (hear or send_vote(session, Moment("commit")))()
        if isinstance(verdict, Departure) and lacks_it and objection is None:
            memory.attempt, session.own.stream = attempt, stream
            session.call("save", lambda: save(session))  # the others leave at this commit: try once more
            leave(session, verdict)
        if verdict is not None and not _loses_nothing(session, verdict):
            raise verdict from error
        raise
    _apply(session, (hear or send_vote(session, Moment("commit")))())
    session.own.forget()
    limit_waits(session.context.world)
    hooks.notify(Hook.committed)


def check(session: Session) -> None:
    verdict = send_vote(session, Moment("check"))()
    if isinstance(verdict, Departure):
        session.call("save", lambda: keep(session))  # ranks leave at a commit
    _apply(session, verdict)


def save(session: Session, objection: HvdrecoverError | None = None) -> None:
    """Copy the state into memory; an objection keeps the commit from becoming durable."""
    clock = session.context.clock
    started = clock.monotonic()
    snapshot = session.memory.commit()
    session.memory.objection = objection
    stall = clock.monotonic() - started
    heartbeat.committed(snapshot.id.generation, snapshot.id.commit, snapshot.state["random"]["stream"])
    session.hooks.notify(Hook.captured, snapshot)
    session.context.events.emit("commit", **vars(snapshot.id), stall=stall)


def save_alone(session: Session) -> None:
    session.own.forget()
    keep(session)


def keep(session: Session) -> None:
    """Make a commit outside of `commit`, with the known rank-local states of the other ranks."""
    save(session, session.hooks.objection(committing=False))


# -- votes -----------------------------------------------------------------------------------------------


def send_vote(session: Session, moment: Moment) -> Callable[[], BaseException | None]:
    """Send this rank's numbers to the others; return a function that waits for the error that all raise."""
    context = session.context
    sent = session.hooks.send(context.world, moment)

    def hear() -> BaseException | None:
        verdict = session.hooks.verdict(moment, sent()[1:])
        if moment.kind == "check" and verdict is not None and _loses_nothing(session, verdict):
            session.own.gather()  # all are there; a commit follows
        return verdict

    return hear


def _loses_nothing(session: Session, verdict: BaseException) -> bool:
    return isinstance(verdict, Departure) or fault_of(verdict, session.context.world) == "hosts"


def _apply(session: Session, verdict: BaseException | None) -> None:
    if isinstance(verdict, Departure):
        leave(session, verdict)
    if verdict is not None:
        raise verdict


# -- the way back ----------------------------------------------------------------------------------------


def roll_back(session: Session) -> None:
    session.memory.resume(reload(session))


def reload(session: Session) -> Snapshot:
    """Load the newest commit again; rank-local state stays as it is."""
    newest = session.memory.newest
    if newest is None:
        raise RecoveryError("memory holds no commit: the last one was interrupted; sync() fetches one")
    load(session, newest)
    session.hooks.notify(Hook.rolled_back)
    return newest


def skip(session: Session, batch: RolledBack) -> None:
    """Roll back, and leave a bad batch out of the rest of its epoch."""
    roll_back(session)
    if batch.order is not None:
        batch.order.leave_out(batch.samples)


def load(session: Session, snapshot: Snapshot, source: str = "") -> bool:
    """Load a commit, of a ``source`` if an earlier start has made it; return whether all of it fits."""
    # All ranks have the components of a commit of this start, so these must fit.
    strict: Strict = session.durable.strict or (False if source else "components")
    where = source or f"commit {snapshot.id}"
    differences = session.memory.load(snapshot, where, strict=strict)
    for line in differences:
        message = f"not loaded from {where}: {line}"
        session.context.announce("not_loaded", message, level=logging.WARNING, what=line)
    return not differences


def iteration_begins(session: Session) -> None:
    """If an iterator is created exactly at a commit, restore the random streams."""
    # A data loader draws from the global generator when its iterator is made. An undisturbed run made it
    # before the commit, a resumed one makes it after.
    memory = session.memory
    if session.context.place.joined and memory.newest is not None and memory.is_at_commit():
        session.own.resume_streams(memory.newest)


# -- the last commit -------------------------------------------------------------------------------------


def leave(session: Session, departure: Departure) -> NoReturn:
    """Leave at a commit that all ranks have made; the ranks that stay have a rendezvous."""
    context, durable, whole = session.context, session.durable, departure.whole
    commit = session.memory.last
    # All ranks have the commit before a rank that holds it is gone.
    context.world.allgather([commit.commit], "hvdrecover.leave")
    if not departure.leaving[context.world.rank()]:
        raise hosts_updated()
    if whole and durable.wanted:
        durable.make_durable(ATTEMPTS)
    if not whole:
        durable.near.remove()  # the others have the commit, and continue
    scope = "job" if whole else "host"
    heartbeat.notify(left=scope)
    heartbeat.enter(heartbeat.Phase.LEFT)
    if not whole:
        message = f"this host leaves at commit {commit.commit}; the others continue"
    elif not durable.root:
        message = f"stopping at commit {commit.commit}; without a checkpoint root, the state is lost"
    else:
        message = f"stopping at commit {commit.commit}, which is durable; start the job again to continue"
    shown = message if not whole or context.world.rank() == 0 else None
    context.events.emit("leave", shown, scope=scope, **vars(commit))
    raise Preempted()


def leave_if_told(session: Session) -> None:
    """Leave at the last commit, if ranks are to leave when the training function has returned."""
    with paused():  # the other ranks may still be at work after their last step
        verdict = send_vote(session, Moment("check", returned=True))()
    if isinstance(verdict, Departure):
        # A signal handler of the script may have made it return early, so the run is not finished. It may
        # have counted an epoch that it did not train.
        session.call("restore", lambda: roll_back(session))
        # The votes brought the other ranks' states from before that. The steps in these will be repeated.
        session.own.gather()
        leave(session, verdict)


def finish(session: Session) -> None:
    session.hooks.notify(Hook.closing)
    if not session.durable.wanted:
        return
    if not session.memory.finished:
        session.own.gather()
        session.call("save", lambda: keep(session))
    session.memory.mark(finished=True)
    session.durable.make_durable(FINISH_ATTEMPTS)
    session.durable.settle()
    commit = session.memory.last
    message = f"finished at commit {commit.commit}; {session.durable.root} holds the result"
    session.context.announce("finished", message, **vars(commit))


def say_finished(session: Session) -> None:
    session.durable.near.remove()
    commit = session.memory.last
    message = (
        f"this run was finished at commit {commit.commit}, and its state is restored; "
        "to continue it, start it by `hvdrecover run --reopen`, or with HVDRECOVER_REOPEN=1; to train anew, "
        "name another checkpoint root"
    )
    session.context.announce("finished", message, **vars(commit))
