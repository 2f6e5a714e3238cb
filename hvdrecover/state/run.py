"""The life of a job on one rank: agree on a state, train, and after a fault do it again.

1. `agree`: all ranks have one commit (see `rendezvous`). A run that an earlier start has finished ends here.
   Before that, the ranks compare their progress (`Rollbacks`), and give up after three rollbacks without any.
2. Train: call the user's function. When it returns, make the last commit durable, and end.
3. An error ends the function. An error of the script ends the process as well, and so does `Preempted`. Any
   other error is one of these faults:
   ``peers`` (ranks were lost), ``hosts`` (hosts have come or gone), ``numbers`` (the guard rolls back a bad
   step).
4. After ``numbers``, all ranks are still there: roll back at once, leave out the bad batch, go to 1.
   After ``hosts``, nothing is lost: make a commit, go to 5.
   After ``peers``, go to 5, and roll back only then: until Horovod is shut down, a collective may still write
   into the tensors, and the frames of the failed step may hold memory.
5. Rendezvous. Roll back if needed, call the user's reset callbacks, go to 1.

A script without such a function calls `State.resume` and `State.finish`, which are steps 1 and 2 without the
call. There, an error ends the process, and the supervisor has all processes of the job start again.
"""

from __future__ import annotations

import atexit
import functools
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from types import FrameType
from typing import Any, TypeVar

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError, NoProgressError, RemovedError, StateError
from hvdrecover.events import Events, show_on_terminal
from hvdrecover.guard.numbers import RolledBack
from hvdrecover.heartbeat import Reading, Stop
from hvdrecover.machine import Clock
from hvdrecover.state import commit as commits
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.state.commit import Session
from hvdrecover.state.hooks import Hook, Preempted
from hvdrecover.state.horovod import (
    Fault,
    fault_of,
    limit_waits,
    mistake_of,
    notifications,
    training_begins,
)
from hvdrecover.state.rendezvous import agree, rendezvous
from hvdrecover.texts import script_line

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result | None]:
    """Decorate a training function, so that it survives lost, new and restarted ranks.

    Before the function is called, all ranks are brought to one state (`State.sync`). When ranks are lost, the
    state goes back to the last commit, the present ranks rendezvous, and the function is called again; when
    hosts merely come or go, nothing is rolled back. When it returns, the run is marked finished.

    SIGTERM or SIGUSR1 (``HVDRECOVER_STOP_SIGNALS``) makes a rank leave at the next commit, with exit code
    75: with its host, if others can continue without it, else with all ranks, after a durable commit.

    Args:
        func: takes the state as its first argument, and resumes from it. Before it is called, the script
            must make no collective call.

    Returns:
        A function of the same arguments. It returns None at once if the run was finished by an earlier start.

    Examples:
        >>> @recover.run
        ... def train(state):
        ...     while state.epoch < 3:
        ...         state.epoch += 1
        ...         state.commit()  # the job can go back to here
        ...     return state.epoch
        >>> train(recover.TorchState(epoch=0))
        3
    """

    @functools.wraps(func)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Result | None:
        session = getattr(state, "_session", None)
        if not isinstance(session, Session):
            raise ConfigError(
                "state",
                f"a {type(state).__module__}.{type(state).__qualname__} is not a state of hvdrecover's; "
                "import its class, or the one that it is derived from, from hvdrecover.torch.elastic or "
                "hvdrecover.tensorflow.elastic, where they have the same names",
            )
        if session.end_signals is not None:
            raise StateError("run", "state.resume() was called before. Use one of the two: remove that call")
        _begin(state, session, in_run=True)
        signals = session.context.config.stop_signals
        with stop_signals(signals, reports=session.context.world.rank() == 0), notifications(state):
            try:
                return _loop(lambda: func(state, *args, **kwargs), state, session)
            except (Exception, SystemExit):
                session.hooks.notify(Hook.leaving)
                raise

    return wrapper


def resume(state: Any) -> None:
    session: Session = state._session
    context = session.context
    if context.place.joined:
        remedy = "Call it once, in a script without @run, which does its work"
        raise StateError("state.resume()", f"the ranks have already agreed on a state. {remedy}")
    if session.guard is not None and session.guard.numerics == "rollback":
        remedy = "state.resume() cannot go back in the middle of a script; use 'skip' or 'raise', or @run"
        raise ConfigError("numerics='rollback'", remedy)
    _begin(state, session, in_run=False)
    if context.config.elastic and not session.durable.wanted and context.world.rank() == 0:
        logger.warning(
            "state.resume() without a checkpoint root: after a fault, all processes start again from the "
            'initial state. Pass one, such as checkpoint="checkpoints/run-1" or --checkpoint'
        )
    signals = ExitStack()
    signals.enter_context(stop_signals(context.config.stop_signals, reports=context.world.rank() == 0))
    session.end_signals = signals.close
    if _agree(session):
        commits.say_finished(session)
    atexit.register(_settle, session)  # if an error or a preemption ends the process


def finish(session: Session) -> None:
    if session.end_signals is None:  # in a function decorated by `run`, or after `State.sync`
        commits.finish(session)
        return
    if not session.memory.finished:  # by an earlier start
        commits.leave_if_told(session)
        commits.finish(session)
    session.end_signals()
    session.end_signals = None
    _end(session)


def _settle(session: Session) -> None:
    if session.end_signals is not None:
        session.hooks.notify(Hook.leaving)
        session.durable.settle()


def _loop(train: Callable[[], Result], state: Any, session: Session) -> Result | None:
    context, memory = session.context, session.memory
    rollbacks = Rollbacks(context.world, context.events, context.clock)
    result: Result | None = None
    fault: Fault | None = None
    reason, steps = "", 0  # of the last fault; the error itself would keep the failed step's tensors alive
    back = False  # whether to roll back after the rendezvous
    while True:
        try:
            if fault in ("peers", "hosts"):
                rendezvous(session, reason, steps)
                rollbacks.rejoined()
                with session.timed("reset"):
                    if back:
                        session.call("restore", lambda: commits.roll_back(session))
                    state.on_reset()
                    if context.world.size() > 1:
                        memory.take_digests()  # now, as other ranks may have to start meanwhile
            if context.config.elastic:
                rollbacks.compare()
            finished = _agree(session, unchanged=back and not state._has_hooks())
            rollbacks.agreed()
            if finished:
                commits.say_finished(session)
            else:
                if not memory.finished:
                    result = train()
                    commits.leave_if_told(session)
                commits.finish(session)
            _end(session)
            return result
        except Preempted:
            raise
        except RemovedError as error:
            heartbeat.enter(heartbeat.Phase.REMOVED)
            logger.warning("%s; this process leaves", error)
            raise Preempted() from None
        except (Exception, SystemExit) as raised:
            cause, fault = _judge(session, raised)
            if fault is None:
                session.durable.settle()
                if cause is raised:
                    raise
                raise cause from None
            reason = f"{type(cause).__name__}: {cause}"
            steps = 0 if fault == "hosts" else heartbeat.page.read().steps
            if fault == "peers":
                rollbacks.note(heartbeat.page.read(), heartbeat.stall_seconds(), cause)
            heartbeat.enter(heartbeat.Phase.RECOVERING)
            if isinstance(cause, RolledBack):
                session.call("restore", functools.partial(commits.skip, session, cause))
            elif fault == "hosts":
                session.call("save", lambda: commits.keep(session))  # before the ranks part
            back = fault == "peers" and memory.last.generation > 0
            del cause


def _agree(session: Session, *, unchanged: bool = False) -> bool:
    """Bring all ranks to one commit; return whether an earlier start of the job has finished the run."""
    source = agree(session, state_unchanged=unchanged)
    session.call("sync", lambda: None)  # a subclass's own, when all ranks have one state
    # Only a mark that was read from the root ends a run. A second training function of this process resumes
    # from the first one's result.
    return session.memory.finished and source == "durable"


def _end(session: Session) -> None:
    if session.durable.wanted:
        session.context.world.past.finished.add(session.durable.root)
    heartbeat.enter(heartbeat.Phase.FINISHED)


def _judge(session: Session, error: BaseException) -> tuple[BaseException, Fault | None]:
    """Return the error that a framework or Horovod has changed into this one, and the fault that it means."""
    error = session.context.framework.original(error) or error
    error = mistake_of(error) or error
    if isinstance(error, RolledBack):
        return error, "numbers"
    return error, fault_of(error, session.context.world) if session.context.config.elastic else None


def _begin(state: Any, session: Session, *, in_run: bool) -> None:
    training_begins()
    heartbeat.training_begins(in_run=in_run)
    past, root = session.context.world.past, session.durable.root
    if root in past.finished and not session.memory.last.generation:
        raise ConfigError(
            "checkpoint",
            f"this process has already finished another state at {root}. This state would get the result "
            f"of that one, without training. Give each state its own checkpoint root, such as {root}/2",
        )
    past.functions += 1
    show_on_terminal(session.context.config)
    if (lack := state._not_durable()) is not None and session.context.world.rank() == 0:
        logger.warning("%s", lack)
    session.memory.mark(finished=False)  # an earlier function of this process may have finished the state


# -- signals of a preemption -------------------------------------------------------------------------------


@contextmanager
def stop_signals(numbers: Sequence[int], *, reports: bool = False) -> Iterator[None]:
    """Handle the signals of a preemption: leave at the next commit; a second signal ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A handler that the script has set stays.
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _take_note)
    if reports:
        # Warn of such handlers at the first commit: the training function may set one until then.
        heartbeat.at_commit(functools.partial(_report_others, numbers))
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _take_note:
                signal.signal(number, signal.SIG_DFL)


def _report_others(numbers: Sequence[int]) -> None:
    for number in numbers:
        handler = signal.getsignal(number)
        if not callable(handler) or handler is _take_note:
            continue
        logger.warning(
            "%s goes to the script's own handler (%s), not to hvdrecover's: if only a training process gets "
            "the signal, the job does not leave. Remove that handler, or send the signal to hvdrecover run: "
            "then the job leaves at its next commit, with exit code 75",
            signal.Signals(number).name,
            getattr(handler, "__qualname__", handler),
        )


def _take_note(number: int, frame: FrameType | None) -> None:
    heartbeat.page.ask(Stop.HOST)
    signal.signal(number, signal.SIG_DFL)


# -- rollbacks in which no rank was lost ---------------------------------------------------------------------
# If a rank is busy for long without a sign of progress, the other ranks stop waiting, and all roll back. The
# ranks find out which of them was busy. They wait longer the next time, and give up if the job makes no
# progress between rollbacks. No process has died, so no guardian counts these.

MAX_ROLLBACKS = 3  # in a row without progress; then the ranks give up
MAX_FAULTS = 10  # in a row in which a rank could not compare its account with the others; then it gives up
LATE = 1000  # ms after the first rank; within these, all ranks that wait in a collective learn that it failed
_REMEDY = (
    "Put what takes so long into `with recover.paused():`, on all ranks, or give a longer --hang-timeout"
)


@dataclass(frozen=True)
class Account:
    """One rank's knowledge of the job's progress; all integers, as they are sent."""

    # Commits at which something had changed, up to the farthest point of the job. Other commits do not count
    # as progress: a script may commit whenever it is called again.
    changes: int = -1
    steps: int = 0  # from there to that point
    returns: int = 0  # rollbacks since then, without a lost rank and without progress
    size: int = 0  # how many ranks there were at the last fault; 0 in a process that has just started
    reached: int = 0  # commits at which something had changed when the last fault came
    done: int = 0  # steps since then
    age: int = 0  # time from the fault to the end of the rendezvous, in ms
    silent: int = 0  # time without progress at the fault, in ms; 0 if that was shorter than ranks wait


def all_there(accounts: Sequence[Account]) -> bool:
    """Return whether the rendezvous has the same ranks as before the fault."""
    return all(each.size == len(accounts) for each in accounts)


def tally(accounts: Sequence[Account]) -> Account:
    changes, steps, returns = max((each.changes, each.steps, each.returns) for each in accounts)
    reached = max(((each.reached, each.done) for each in accounts if each.size), default=(-1, 0))
    if reached > (changes, steps):
        return Account(*reached)
    return Account(changes, steps, returns + all_there(accounts))


def kept_waiting(accounts: Sequence[Account]) -> dict[int, float]:
    """Return the ranks that were busy while the others waited for them, and for how many seconds."""
    if not all_there(accounts):
        return {}  # a rank was lost, so no rank is to blame
    # Ranks that wait in a collective learn together that it has failed. A busy rank learns it later.
    first = max(each.age for each in accounts)
    return {
        rank: each.silent / 1000
        for rank, each in enumerate(accounts)
        if each.silent and first - each.age > LATE
    }


class Rollbacks:
    """One rank's account of rollbacks, for one training function."""

    def __init__(self, world: World, events: Events, clock: Clock) -> None:
        self._world = world
        self._events = events
        self._clock = clock
        self._account = Account()
        self._first: tuple[float, int] | None = None  # the first fault's time and limit of waits
        self._faults = self._commit = 0
        self._reason = self._place = ""
        self._warned: set[str] = set()
        self._learnt = False

    def note(self, reading: Reading, limit: int, error: BaseException) -> None:
        """Note a fault: ranks seem to be lost. Ranks wait ``limit`` seconds for a silent one; 0: no limit."""
        mine = self._account
        self._faults += 1
        self._reason, self._commit = str(error), reading.commit
        if self._first is None:  # later faults in a row are consequences of the first
            self._first, self._place = (self._clock.monotonic(), limit), script_line(error)
            if 0 < limit < reading.silent:
                mine = replace(mine, silent=int(reading.silent * 1000))
        reached, done = max((mine.reached, mine.done), reading.point)
        self._account = replace(mine, size=self._world.size(), reached=reached, done=done)

    def rejoined(self) -> None:
        if self._faults >= MAX_FAULTS:
            raise self._no_progress(self._faults, None, "")
        if self._first is not None:
            age = int((self._clock.monotonic() - self._first[0]) * 1000)
            self._account = replace(self._account, age=age)

    def compare(self) -> None:
        """Compare accounts with the other ranks. All ranks call this after the rendezvous, before `agree`."""
        table = self._world.allgather(astuple(self._account), "hvdrecover.rollbacks")
        accounts = [Account(*row) for row in table.tolist()]
        self._account, silent = tally(accounts), kept_waiting(accounts)
        slowest = max(silent, key=silent.__getitem__, default=None)
        if self._account.returns >= MAX_ROLLBACKS:
            places = gather_json(self._world, self._place, "hvdrecover.places")
            busy = "" if slowest is None else _busy(slowest, silent[slowest], places[slowest])
            raise self._no_progress(self._account.returns, slowest, busy)
        if self._first is not None and (mine := silent.get(self._world.rank())):
            self._learn(mine, self._first[1])
        self._learnt = bool(silent)
        self._first, self._faults = None, 0

    def agreed(self) -> None:
        """Apply the longer wait at once, now that all ranks know it."""
        if self._learnt:
            heartbeat.await_guardian()
            limit_waits(self._world)

    def _learn(self, seconds: float, limit: int) -> None:
        """Make the other ranks wait longer the next time, as this rank was busy; log the remedy."""
        heartbeat.page.has_seen(seconds)
        message = None
        if self._place not in self._warned:
            self._warned.add(self._place)
            message = (
                f"{_busy(self._world.rank(), seconds, self._place)}. The others wait for {limit} s at most, "
                f"so all have gone back to the last commit, and it is done again. {_REMEDY}"
            )
        facts = {"seconds": seconds, "limit": limit, "where": self._place}
        self._events.emit("kept_waiting", message, level=logging.WARNING, **facts)

    def _no_progress(self, rollbacks: int, rank: int | None, busy: str) -> NoProgressError:
        cause = f"Of them, {busy}, longer than the others wait. {_REMEDY}."
        if rank is None:
            cause = (
                f"The last collective failed with: {self._reason}\nIf all ranks call it, in the same "
                "order, and the network is sound, look for a rank that is busy for too long, and put that "
                "into `with recover.paused():`, on all ranks."
            )
        head = (
            f"commit {self._commit}: the ranks have rolled back {rollbacks} times in a row without getting "
            f"farther than {self._account.steps} steps beyond it, though none of them was lost"
        )
        return NoProgressError(f"{head}. {cause}", self._commit, rank)


def _busy(rank: int, seconds: float, where: str) -> str:
    before = f" before {where}" if where else ""
    return f"rank {rank} was busy for {seconds:.1f} s without a sign of progress{before}"
