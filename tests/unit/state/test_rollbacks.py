"""Rollbacks in which nobody was lost: the gap that is learnt, and the end of those that get no farther."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover import heartbeat
from hvdrecover.errors import NoProgressError
from hvdrecover.events import Events
from hvdrecover.heartbeat import Page, Phase, Reading
from hvdrecover.state.run import MAX_ROLLBACKS, Account, Rollbacks, kept_waiting, run, tally
from hvdrecover.state.state import State
from tests.fakes.clock import FakeClock
from tests.unit.state.jobs import Process, on_ranks


def fault(reached: int = 5, done: int = 0, **facts: int) -> Account:
    """Return what a survivor of a job of two ranks reports."""
    return Account(**{"size": 2, "reached": reached, "done": done, **facts})


@pytest.mark.parametrize(
    ("places", "returns"),
    [
        ([(0, 0)] * 4, [0, 1, 2, 3]),
        ([(5, 3), (5, 3), (5, 2), (4, 9)], [0, 1, 2, 3]),
        ([(5, 3), (5, 3), (5, 4), (5, 4), (6, 0)], [0, 1, 0, 1, 0]),
    ],
)
def test_what_gets_no_farther_than_ever_is_counted(places: list[tuple[int, int]], returns: list[int]) -> None:
    told, known = [], Account()
    for reached, done in places:
        known = tally([replace(known, size=2, reached=reached, done=done)] * 2)
        told.append(known.returns)
    assert told == returns


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        (fault(age=0, silent=6500), {0: 6.5}),
        (fault(age=6400, silent=6500), {}),  # it learnt of the fault with the other: it waited as well
        (fault(age=0, silent=0), {}),
        (fault(age=0, silent=6500, size=3), {}),  # a rank was lost
    ],
)
def test_a_rank_that_learns_of_the_fault_later_was_busy(late: Account, expected: dict[int, float]) -> None:
    assert kept_waiting([late, fault(age=6500, silent=3100)]) == expected


def test_the_busy_rank_learns_its_gap_and_is_named(page: Page, caplog: pytest.LogCaptureFixture) -> None:
    def body(process: Process) -> Any:
        clock, rank = FakeClock(), process.world.rank()
        rollbacks = Rollbacks(process.world, Events(None, "host", clock), clock)
        after = (6.5, 3.2)[rank]
        for _ in range(MAX_ROLLBACKS + 1):
            clock.advance(after)
            reading = Reading(Phase.TRAINING, silent=after, steps=1, commit=9, changed=5)
            rollbacks.note(reading, 3, HorovodInternalError("no"))
            clock.advance(10.0 - after)
            rollbacks.rejoined()
            try:
                rollbacks.compare()
            except NoProgressError as error:
                return error

    errors = on_ranks(2, body)
    assert heartbeat.page.longest == 6.5  # the ranks share a page
    (warning,) = [message for message in caplog.messages if "paused()" in message]
    assert "rank 0 was busy for 6.5 s" in warning and "wait for 3 s" in warning
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert (error.commit, error.rank) == (9, 0)
        assert re.search(
            rf"commit 9: .* {MAX_ROLLBACKS} times .* 1 steps.* rank 0 was busy for 6.5 s", str(error)
        )


def always_failing(steps: int, at: int, *, at_the_top: bool = False) -> Callable[[Process], list[int]]:
    """A script with a collective that fails at one step, whenever it comes there; the step at each call."""

    def body(process: Process) -> list[int]:
        calls, state = [], process.state(step=0)

        @run
        def train(state: State) -> None:
            calls.append(state.step)
            if at_the_top:
                state.commit()
            while state.step < steps:
                state.step += 1
                process.world.allgather([1], "step")
                if state.step == at:
                    raise HorovodInternalError("the ranks do not call the same")
                if state.step % 2 == 0:
                    state.commit()

        with pytest.raises(NoProgressError, match="the ranks do not call the same") as caught:
            train(state)
        # Of steps 2 and 4, and of each call.
        assert caught.value.commit == 2 + at_the_top * (1 + MAX_ROLLBACKS)
        return calls

    return body


@pytest.mark.parametrize("at_the_top", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_collective_that_always_fails_ends_the_job(size: int, at_the_top: bool) -> None:
    results = on_ranks(size, always_failing(10, 5, at_the_top=at_the_top))
    assert results == [[0] + [4] * MAX_ROLLBACKS] * size
