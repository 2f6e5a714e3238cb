"""State that ranks have of their own, and lose to another rank's at a recovery, is reported beforehand."""

from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.guard.settings import Guard
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel
from tests.fakes.world import fail_at
from tests.unit.state.jobs import Process, on_ranks

LOCAL = "hvdrecover.guard.rank_local"


def build(process: Process, guard: Guard | None, **attributes: Any) -> State:
    return process.state(guard=guard, model=FakeModel(w=[1.0], local=[0.0]), **attributes)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "rank" in each.getMessage()]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in told(caplog) if "of one rank" in each or "all continue with those" in each]


def test_plain_objects_and_statistics_that_differ_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    def body(process: Process) -> None:
        state = build(process, Guard(parameters_every_commits=2), running_loss=0.0, epoch=0, losses=[])
        state.sync()
        for step in range(6):
            state.running_loss += 80.19 + process.world.rank() if step == 0 else 0.0
            state.model.weights["local"] += process.world.rank()
            state.epoch += 1
            state.commit()

    on_ranks(2, body)
    (line,) = warnings(caplog)
    assert "state.running_loss differs between the ranks (rank 0: 80.19, rank 1: 81.19)" in line
    assert "running statistics are each rank's own (model.local)" in line
    assert "after a recovery all continue with those of one rank. Average it over the ranks" in line
    assert "epoch" not in line and "losses" not in line and "model.w" not in line


@pytest.mark.parametrize("own", [False, True])
def test_without_a_guard_nobody_looks_and_alike_nobody_warns(
    own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(process: Process) -> None:
        state = build(process, None if own else Guard(parameters_every_commits=1), loss=0)
        state.sync()
        for _ in range(3):
            state.loss += process.world.rank() * own + 1
            state.commit()

    on_ranks(2, body)
    assert warnings(caplog) == []


def test_at_a_recovery_those_that_hold_the_same_commit_are_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Between comparisons of parameters, or without any."""

    def body(process: Process) -> Any:
        state = build(process, Guard(parameters_every_commits=None), loss=0, step=0)

        @run
        def train(state: State) -> None:
            while state.step < 6:
                state.step += 1
                state.loss += process.world.rank()
                state.commit()
                process.world.allgather([state.step], "step")

        train(state)
        return state.loss

    on_ranks(3, body, [fail_at(0, "step", 3, replacement="in_place")])
    (line,) = warnings(caplog)
    assert (
        "state.loss differs between the ranks (rank 1: 3, rank 2: 6); all continue with those of rank 1"
        in line
    )


def test_a_process_that_came_later_does_not_warn_again(caplog: pytest.LogCaptureFixture) -> None:
    def body(process: Process) -> None:
        state = build(process, Guard(parameters_every_commits=1), loss=0, step=0)

        @run
        def train(state: State) -> None:
            while state.step < 6:
                state.step += 1
                state.loss += process.world.rank()
                state.commit()
                process.world.allgather([state.step], "step")

        train(state)

    on_ranks(3, body, [fail_at(0, "step", 3, replacement="in_place")])
    assert len(warnings(caplog)) == 1
