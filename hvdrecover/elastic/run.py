"""The loop around a training function: agree on a state, train, and after a fault do it again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from hvdrecover.elastic.horovod import Fault, fault_of, notifications
from hvdrecover.elastic.state import State
from hvdrecover.errors import RecoveryError
from hvdrecover.events import show_on_terminal

Result = TypeVar("Result")


def run(function: Callable[..., Result]) -> Callable[..., Result | None]:
    """Decorate a training function, so that it survives lost, new and restarted ranks.

    Before the function is called, all ranks are brought to one state (`State.sync`). When ranks are lost, the
    state goes back to the last commit, the ranks that are there meet again, and the function is called anew;
    when hosts merely come or go, nothing is rolled back. When it returns, the run is marked finished.

    Args:
        function: takes the state as its first argument. It must not make a collective call before it is
            called, and must go on from what the state says.

    Returns:
        A function of the same arguments. It returns None at once if the run was finished by an earlier start.
    """

    @functools.wraps(function)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result | None:
        show_on_terminal(state._config)
        state.reopen()
        with notifications(state):
            return _loop(lambda: function(state, *args, **kwargs), state)

    return wrapper


def _loop(train: Callable[[], Result], state: State) -> Result | None:
    result: Result | None = None
    reason: BaseException | None = None
    while True:
        try:
            if reason is not None:
                _meet_again(state, reason)
            source = state.agree()
            if state.finished and source == "durable":
                state.say_finished()
                return None
            if not state.finished:
                result = train()
            state.finish()
            return result
        except (Exception, SystemExit) as error:
            fault = fault_of(error, state._world) if state._config.elastic else None
            if fault is None:
                state.settle()
                raise
            _keep_or_roll_back(state, fault)
            reason = error


def _keep_or_roll_back(state: State, fault: Fault) -> None:
    """Before the ranks part: keep what a mere change of hosts has not spoilt, roll back what a loss has."""
    if fault == "hosts":
        state.save()
    elif state.last_commit.generation > 0:
        state.restore()


def _meet_again(state: State, reason: BaseException) -> None:
    try:
        state.meet_again(reason)
    except ValueError as error:  # what hvd.init() raises when it fails
        raise RecoveryError(f"this rank could not meet the others again: {error}") from error
    state.on_reset()
