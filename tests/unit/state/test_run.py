"""The loop around a training function; and a plain loop, with `State.resume` and `State.finish`."""

from __future__ import annotations

import dataclasses
import math
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover.config import PREEMPTED
from hvdrecover.errors import (
    ConfigError,
    RecoveryError,
    RemovedError,
    RendezvousError,
    StateError,
    StorageError,
)
from hvdrecover.guard import Guard
from hvdrecover.heartbeat import Page, Phase
from hvdrecover.state.durable import FINISH_ATTEMPTS
from hvdrecover.state.hooks import Preempted
from hvdrecover.state.rendezvous import RENDEZVOUS
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeSampler
from tests.fakes.root import FakeRoots
from tests.fakes.world import FakeJob, Fault
from tests.unit.state.jobs import CONFIG, STATIC, URL, Process, initialised


def count(process: Process, state: State) -> None:
    """Do a step: one more in the weight, too."""
    process.world.allreduce(np.zeros(1))
    state.model.weights["w"] += 1
    state.step += 1
    state.commit()


# -- lost ranks --------------------------------------------------------------------------------------------


def test_the_memory_of_an_interrupted_step_is_let_go_before_the_ranks_agree() -> None:
    interrupted: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    def body(process: Process) -> None:
        state = process.state(model=FakeModel(w=0.0), step=0)
        state.register_reset_callbacks([lambda: alive.append(interrupted[0]() is not None)])

        def train(state: State) -> None:
            while state.step < 4:
                activations = np.ones(1)
                if process.world.rank() == 0:
                    interrupted[:] = [weakref.ref(activations)]
                process.world.allreduce(activations)
                state.step += 1
                state.commit()

        run(train)(state)

    FakeJob(initialised(body), 2, [Fault(1, "gradient", 3)]).results()
    assert alive == [False]


class Adjusting(State):
    """Has a method that changes a weight after ours."""

    def __init__(self, process: Process) -> None:
        attributes = {"model": FakeModel(w=0.0), "step": 0}
        super().__init__(process.framework, process.world, config=CONFIG, attributes=attributes)

    def restore(self) -> None:
        super().restore()
        self.model.weights["w"][...] = 9.0


def plain(process: Process) -> State:
    return process.state(model=FakeModel(w=0.0), step=0)


def with_callback(process: Process) -> State:
    state = plain(process)
    state.register_reset_callbacks([lambda: state.model.weights["w"].fill(9.0)])
    return state


def with_a_method_of_its_own(process: Process) -> State:
    state = plain(process)
    vars(state)["on_reset"] = lambda: state.model.weights["w"].fill(9.0)
    return state


@pytest.mark.parametrize(
    ("make", "weight"),
    [(plain, 2.0), (with_callback, 9.0), (with_a_method_of_its_own, 9.0), (Adjusting, 9.0)],
)
def test_a_survivor_sends_its_commit_or_what_the_script_has_changed_in_it(
    make: Callable[[Process], State], weight: float
) -> None:
    found: dict[bool, tuple[float, bool]] = {}  # by whether a rank survived: its weight, if its commit is old

    def body(process: Process) -> None:
        state, begun = make(process), []

        def train(state: State) -> None:
            newest = state._session.memory.newest
            assert newest is not None
            if newest.id.generation > 1:  # a copy that is made now has no digests yet
                found[bool(begun)] = float(state.model.weights["w"]), newest.digests is not None
            begun.append(newest.id)
            while state.step < 4:
                count(process, state)

        run(train)(state)

    FakeJob(initialised(body), 2, [Fault(1, "gradient", 3, replacement="in_place")]).results()
    assert found[True] == (weight, weight == 2.0)
    assert found[False][0] == weight


# -- the end, and a start ----------------------------------------------------------------------------------


def test_an_end_that_can_not_be_written_is_an_error_on_all_ranks(roots: FakeRoots) -> None:
    def body(process: Process) -> None:
        def train(state: State) -> None:
            state.step = 1
            roots[URL].failures = math.inf

        run(train)(process.state(URL, model=FakeModel(w=0.0), step=0))

    outcomes = FakeJob(initialised(body), 2).run()
    errors = [outcome.error for outcome in sorted(outcomes, key=lambda outcome: outcome.world.place)]
    assert isinstance(errors[0], StorageError)
    assert isinstance(errors[1], RecoveryError)
    assert roots[URL].attempts >= FINISH_ATTEMPTS
    assert roots[URL].commits() == []
    roots[URL].failures = 0  # the writer is still at it; it ends with this


@pytest.mark.parametrize(("claimed", "fails"), [(URL, True), ("fake://another", False), (None, False)])
def test_a_root_that_the_job_has_claimed_must_hold_its_claim(
    process: Process, claimed: str | None, fails: bool
) -> None:
    process.clock.impatient = True
    state = process.state(URL, config=dataclasses.replace(CONFIG, claimed=claimed), step=0)
    with pytest.raises(StorageError, match="claims/ ") if fails else nullcontext():
        state.sync()


def test_ranks_at_states_with_different_roots_start_again_together() -> None:
    def body(process: Process) -> None:
        state = process.state(f"fake://fold-{process.world.rank()}", step=0)
        run(lambda state: None)(state)

    for outcome in FakeJob(initialised(body), 2).run():
        assert isinstance(outcome.error, RecoveryError)
        assert "at checkpoint root 'fake://fold-" in str(outcome.error)


# -- errors of the user's own ------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(1)])
def test_an_error_of_the_user_passes_unchanged(process: Process, error: BaseException) -> None:
    calls = []

    @run
    def train(state: State) -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)) as caught:
        train(process.state(URL))
    assert caught.value is error and caught.value.__cause__ is None
    assert calls == [1]


def test_a_static_job_can_not_continue_without_a_rank(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOROVOD_ELASTIC")
    lost = HorovodInternalError("a rank was lost")

    @run
    def train(state: State) -> None:
        raise lost

    with pytest.raises(HorovodInternalError) as caught:
        train(process.state(config=STATIC))
    assert caught.value is lost
    assert process.world.rendezvouses == 1


def train_once_lost(process: Process, refusals: list[RecoveryError]) -> list[int]:
    """Lose a rank, and fail at a rendezvous as often as there are refusals; the step at each call."""
    rendezvous, calls, state = process.world.init, [], process.state(step=0)

    def refuse() -> None:
        if refusals:
            raise refusals.pop(0)
        rendezvous()

    @run
    def train(state: State) -> None:
        calls.append(state.step)
        state.step = 1
        if len(calls) == 1:
            state.commit()
            state.step = 2
            process.world.init = refuse  # type: ignore[method-assign]
            raise HorovodInternalError("a rank was lost")

    train(state)
    return calls


def test_a_rendezvous_that_fails_is_tried_again_a_limited_number_of_times(process: Process) -> None:
    refusals: list[RecoveryError] = [RendezvousError(f"refusal {number}") for number in range(RENDEZVOUS - 1)]
    assert train_once_lost(process, refusals) == [0, 1]
    refusals = [RendezvousError(f"refusal {number}") for number in range(RENDEZVOUS + 1)]
    with pytest.raises(RendezvousError, match=f"refusal {RENDEZVOUS - 1}"):
        train_once_lost(process, refusals)
    assert len(refusals) == 1


def test_a_rank_that_was_taken_out_leaves_at_once(
    process: Process, page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    refusals: list[RecoveryError] = [RemovedError("h1 has been removed"), RendezvousError("asked again")]
    with pytest.raises(Preempted) as caught:
        train_once_lost(process, refusals)
    assert caught.value.code == PREEMPTED
    assert len(refusals) == 1
    assert page.read().phase == Phase.REMOVED
    assert "h1 has been removed; this process leaves" in caplog.messages


def test_the_guardian_knows_that_the_process_does_not_survive_others(process: Process, page: Page) -> None:
    state = process.state(URL, step=0)
    page.phase = Phase.PLAIN
    state.resume()
    assert (page.phase, page.in_run) == (Phase.BEGINNING, 0)
    state.finish()
    assert page.phase == Phase.FINISHED


def test_a_call_at_the_wrong_place_is_an_error_that_says_so(process: Process) -> None:
    state = process.state(URL, step=0)
    for early in (state.commit, state.finish):
        with pytest.raises(StateError, match=re.escape("state.resume() first")):
            early()
    state.resume()
    with pytest.raises(StateError, match="Call it once"):
        state.resume()
    with pytest.raises(StateError, match="remove that"):
        run(lambda state: None)(state)


def test_resume_in_a_training_function_is_an_error(process: Process) -> None:
    with pytest.raises(StateError, match="without @run"):
        run(lambda state: state.resume())(process.state(URL, step=0))


def test_a_guard_that_rolls_back_needs_a_training_function(process: Process) -> None:
    with pytest.raises(ConfigError, match="go back"):
        process.state(URL, guard=Guard(numerics="rollback"), sampler=FakeSampler(4)).resume()
