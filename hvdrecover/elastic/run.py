"""The loop around a training function: agree on a state, train, and after a fault do it again."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from hvdrecover import heartbeat
from hvdrecover.elastic.agreement.rollbacks import Rollbacks
from hvdrecover.elastic.attributes import nothing
from hvdrecover.elastic.companions import Observer
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.horovod import Fault, fault_of, notifications
from hvdrecover.elastic.lifecycle import early, leaving
from hvdrecover.elastic.recovery import Recovery
from hvdrecover.elastic.state import State
from hvdrecover.errors import ConfigError, RemovedError, RendezvousError
from hvdrecover.events import show_on_terminal
from hvdrecover.guard.numbers import RolledBack

logger = logging.getLogger(__name__)

RENDEZVOUS = 10  # how often a rank tries a rendezvous, as any other rank may be lost in it

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result | None]:
    """Decorate a training function, so that it survives lost, new and restarted ranks.

    Before the function is called, all ranks are brought to one state (`State.sync`). When ranks are lost, the
    state goes back to the last commit, the ranks that are there rendezvous, and the function is called anew;
    when hosts merely come or go, nothing is rolled back. When it returns, the run is marked finished.

    SIGTERM or SIGUSR1 (``HVDRECOVER_STOP_SIGNALS``) makes a rank leave at the next commit, with exit code
    75: with its host, if others can continue without it, else with all ranks, after a durable commit.

    Args:
        func: takes the state as its first argument. It must not make a collective call before it is
            called, and must resume from what the state says.

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
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result | None:
        _refuse_others(state)
        _begin(state)
        config = state._context.config
        show_on_terminal(config)
        if (lack := state._not_durable()) is not None and state._context.world.rank() == 0:
            logger.warning("%s", lack)
        state._ends.reopen()
        with leaving.signals(config, reports=state._context.world.rank() == 0), notifications(state):
            try:
                return _loop(lambda: func(state, *args, **kwargs), state)
            except (Exception, SystemExit):
                state._companions.notify(Observer.leaving)
                raise

    return wrapper


def _loop(train: Callable[[], Result], state: State) -> Result | None:
    result: Result | None = None
    reason = ""  # for another rendezvous; the error itself would keep the tensors of the step that it ended
    steps = 0
    back = False  # whether to roll back after the rendezvous
    context, recovery = state._context, state._recovery
    rollbacks = Rollbacks(context.world, context.events, context.clock)
    while True:
        try:
            if reason:
                _rendezvous(recovery, reason, steps)
                rollbacks.rejoined()
                if back:  # by now, what was under way is over: Horovod's work, and the script's frames
                    with recovery.timed("reset"):
                        state._around("restore", recovery.roll_back)
                state.on_reset()
                if context.world.size() > 1:
                    with recovery.timed("reset"):
                        state._memory.take_digests()  # others may have to start first
            if context.config.elastic:
                rollbacks.compare()
            source = recovery.agree(rollbacks.farthest, kept=back and not state._has_hooks())
            rollbacks.agreed()
            state._around("sync", nothing)  # a subclass's own: after ours, when all have one state
            # The mark ends a start, not a process: a second function resumes from the first one's result.
            if state._memory.finished and source == "durable":
                state._ends.say_finished()
            else:
                if not state._memory.finished:
                    result = train()
                    state._leave_if_told()
                State.finish(state)  # by the class: an attribute of the script may have this name
            if state._durable.wanted:
                context.world.past.finished.add(state._durable.root)
            heartbeat.enter(heartbeat.Phase.FINISHED)
            return result
        except leaving.Preempted:
            raise
        except RemovedError as error:
            heartbeat.enter(heartbeat.Phase.REMOVED)
            logger.warning("%s; this process leaves", error)
            raise leaving.Preempted() from None
        except (Exception, SystemExit) as raised:
            moment = rollbacks.moment()
            cause = recovery.cause(raised)
            fault = _fault(cause, context)
            if fault is None:
                state._durable.settle()
                if cause is raised:
                    raise
                raise cause from None
            reason, steps = _text(cause), 0 if fault == "hosts" else heartbeat.steps()
            heartbeat.enter(heartbeat.Phase.RECOVERING)
            if fault == "peers":
                rollbacks.note(moment, state._own.random.number, cause)
            if isinstance(cause, RolledBack):
                state._around("restore", functools.partial(recovery.skip, cause))
                reason = ""  # all ranks are still there, so they need no rendezvous
            elif fault == "hosts":
                state._around("save", state._keep)  # before the ranks part: nothing is spoilt
            back = fault == "peers" and state._memory.last.generation > 0
            del cause


def _refuse_others(state: Any) -> None:
    if not isinstance(state, State):
        kind = type(state)
        raise ConfigError(
            "state",
            f"a {kind.__module__}.{kind.__qualname__} is not a state of hvdrecover's; import its class, or "
            "the one that it is derived from, from hvdrecover.torch.elastic or "
            "hvdrecover.tensorflow.elastic, where they have the same names",
        )


def _begin(state: State) -> None:
    """Note that a training function begins.

    Raises:
        ConfigError: it would be given the result of another state that this process has finished.
    """
    early.end()
    past, root = state._context.world.past, state._durable.root
    if root in past.finished and not state._memory.last.generation:
        raise ConfigError(
            "checkpoint",
            f"this process has already finished another state at {root}. This state would get the result "
            f"of that one, without training. Give each state its own checkpoint root, such as {root}/2",
        )
    past.functions += 1


def _fault(cause: BaseException, context: Context) -> Fault | None:
    """Return why the training function is to be called again; None if it isn't."""
    if isinstance(cause, RolledBack):
        return "numbers"
    return fault_of(cause, context.world) if context.config.elastic else None


def _rendezvous(recovery: Recovery, reason: str, steps: int) -> None:
    for attempt in range(1, RENDEZVOUS + 1):
        try:
            recovery.rendezvous(reason, steps if attempt == 1 else 0)
            break
        except RendezvousError as error:
            if attempt == RENDEZVOUS:
                raise
            reason = _text(error)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
