"""Rollbacks in which nobody was lost: the gap that is learnt, and the end of those that get no farther."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from horovod.common.exceptions import HorovodInternalError

from hvdrecover import heartbeat
from hvdrecover.errors import NoProgressError
from hvdrecover.events import Events
from hvdrecover.heartbeat import Page, Phase, Reading
from hvdrecover.state import liveness
from hvdrecover.state.rollbacks import (
    LATE,
    LIMIT,
    Account,
    FaultNotice,
    Rollbacks,
    Tally,
    kept_waiting,
    place,
    silence,
    tally,
    waits_apart,
)
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.clock import FakeClock
from tests.fakes.world import FakeJob, FakeWorld, Fault, change_at, fail_at
from tests.unit.state.jobs import Process, initialised, on_ranks

HERE = __file__


# -- how far a job has come --------------------------------------------------------------------------------


def fault(reached: int = 5, done: int = 0, **facts: int) -> Account:
    """Return what a survivor of a job of two ranks reports."""
    return Account(**{"faults": 1, "size": 2, "reached": reached, "done": done, **facts})


def rounds(*places: tuple[int, int]) -> list[int]:
    """Return how often a job of two ranks has come back, after faults at these places."""
    told, known = [], Tally()
    for changes, steps in places:
        before = {"changes": known.changes, "steps": known.steps, "returns": known.returns}
        known = tally([fault(changes, steps, **before)] * 2)
        told.append(known.returns)
    return told


@pytest.mark.parametrize(
    ("places", "returns"),
    [
        ([(0, 0)] * 4, [0, 1, 2, 3]),
        ([(5, 3), (5, 3), (5, 2), (4, 9)], [0, 1, 2, 3]),
        ([(5, 3), (5, 3), (5, 4), (5, 4), (6, 0)], [0, 1, 0, 1, 0]),
    ],
)
def test_what_gets_no_farther_than_ever_is_counted(places: list[tuple[int, int]], returns: list[int]) -> None:
    assert rounds(*places) == returns


def test_one_rank_that_gets_farther_is_progress() -> None:
    before = {"changes": 5, "steps": 3, "returns": 2}
    assert tally([fault(5, 3, **before), fault(5, 4, **before)]) == Tally(5, 4, 0)


# -- who kept the others waiting ---------------------------------------------------------------------------


def waiting(age: int, silent: int, limit: int = 3) -> Account:
    return fault(age=age, silent=silent, limit=limit)


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        (waiting(age=0, silent=6500), {0: 6.5}),
        (waiting(age=6499, silent=6500), {0: 6.5}),
        (waiting(age=6500, silent=6500), {}),  # it learnt of the fault with the other: it waited as well
        (waiting(age=0, silent=3000), {}),  # nobody gives up as soon as that
    ],
)
def test_who_learns_of_the_fault_later_was_not_waiting(late: Account, expected: dict[int, float]) -> None:
    assert kept_waiting([late, waiting(age=6500, silent=3100)]) == expected


def test_one_that_merely_waited_is_not_blamed_for_learning_of_the_fault_a_little_later() -> None:
    others = [waiting(age=6500, silent=3200), waiting(age=6500 - LATE, silent=4200)]
    assert kept_waiting([replace(each, size=3) for each in [*others, waiting(age=0, silent=9700)]]) == {
        2: 9.7
    }
    late = [waiting(age=6499 - LATE, silent=4200), waiting(age=0, silent=9700)]
    assert kept_waiting([replace(each, size=3) for each in [others[0], *late]]) == {1: 4.2, 2: 9.7}


@pytest.mark.parametrize(
    ("missing", "size", "waits"),
    [
        ({0: ["b"], 1: ["a"]}, 2, "rank 0 in a; rank 1 in b"),
        ({0: ["b"], 1: ["a"], 2: ["a"]}, 3, "rank 0 in a; ranks 1, 2 in b"),
        ({0: list("fghij"), 1: ["a"]}, 2, "rank 0 in a; rank 1 in f, g, h and 2 more"),
        ({1: ["a", "b"]}, 2, ""),  # rank 1 may be busy
        ({0: ["b"], 1: ["a"], 2: ["a", "b"]}, 3, ""),  # rank 2 may be busy
        ({0: ["b"], 1: ["a"]}, 3, ""),  # rank 2 has called both
        ({}, 1, ""),
    ],
)
def test_ranks_are_out_of_step_if_each_waits_in_a_collective_that_another_has_not_called(
    missing: dict[int, list[str]], size: int, waits: str
) -> None:
    assert waits_apart(missing, size) == waits


@pytest.mark.parametrize(
    ("reading", "seconds"),
    [
        (Reading(Phase.TRAINING, silent=6.5), 6.5),
        (Reading(Phase.BEGINNING, silent=6.5), 6.5),
        (Reading(Phase.RECOVERING, silent=6.5), 0.0),
        (Reading(Phase.STARTING, silent=6.5), 0.0),
        (Reading(Phase.TRAINING, silent=6.5, paused=True), 0.0),
        (Reading(Phase.TRAINING, silent=6.5, waiting=True), 0.0),
    ],
)
def test_only_a_silence_that_counts_is_one(reading: Reading, seconds: float) -> None:
    assert silence(reading) == seconds


def caught(action: Callable[[], object]) -> BaseException:
    try:
        action()
    except Exception as error:
        return error
    raise AssertionError("no error")


def test_the_place_is_the_innermost_line_of_the_users_own() -> None:
    def fail() -> None:
        int("x")

    assert place(caught(fail)).startswith(f"{HERE}:") and place(caught(fail)).endswith(" in fail")
    assert place(caught(lambda: __import__("json").loads("{"))).endswith(" in <lambda>")
    assert place(HorovodInternalError()) == ""


# -- on the ranks ------------------------------------------------------------------------------------------


@dataclass
class Rank:
    """One rank's side, with a clock of its own."""

    world: FakeWorld
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.rollbacks = Rollbacks(self.world, Events(None, "host", self.clock), self.clock)

    def fault(
        self, after: float, reading: Reading, limit: int = 3, missing: dict[int, list[str]] | None = None
    ) -> None:
        """Learn of a fault after so many seconds; the next rendezvous is ten seconds after the first one."""
        moment = FaultNotice(self.clock.seconds + after, reading, limit, missing or {})
        self.rollbacks.note(moment, 5, HorovodInternalError("no"))
        self.clock.advance(10.0)
        self.rollbacks.rejoined()


def two_ranks(phase: Phase, *, limit: int = 3, times: int = 1) -> list[Any]:
    """Rank 0 is busy for 6.5 s, the other gives it up after 3.2 s; what the ranks end with."""

    def body(process: Process) -> BaseException | None:
        rank = Rank(process.world)
        for _ in range(times):
            after = 6.5 if process.world.rank() == 0 else 3.2
            rank.fault(after, Reading(phase, silent=after, steps=1, commit=9), limit)
            try:
                rank.rollbacks.compare()
            except NoProgressError as error:
                return error
        return None

    return on_ranks(2, body)


@pytest.mark.parametrize(
    ("phase", "learnt"),
    [(Phase.TRAINING, (6.5, 6.5)), (Phase.BEGINNING, (0.0, 6.5)), (Phase.STARTING, (0.0, 0.0))],
)
def test_the_rank_that_was_busy_learns_its_gap_and_who_waited_does_not(
    phase: Phase, learnt: tuple[float, float], page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    two_ranks(phase)
    assert heartbeat.longest() == learnt  # the ranks share a page: who waited would have learnt no more
    warnings = [message for message in caplog.messages if "paused()" in message]
    assert len(warnings) == (learnt != (0.0, 0.0))
    assert all("rank 0 was busy for 6.5 s" in message and "wait for 3 s" in message for message in warnings)


def test_without_a_limit_for_waiting_nothing_is_learnt(caplog: pytest.LogCaptureFixture) -> None:
    two_ranks(Phase.TRAINING, limit=0)
    assert heartbeat.longest() == (0.0, 0.0)
    assert not any("paused()" in message for message in caplog.messages)


def test_a_place_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    two_ranks(Phase.TRAINING, times=LIMIT)
    assert len([message for message in caplog.messages if "paused()" in message]) == 1


def test_all_ranks_end_with_the_same_error_that_names_who_was_busy() -> None:
    errors = two_ranks(Phase.TRAINING, times=LIMIT + 1)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert (error.commit, error.rank) == (9, 0)
        assert re.search(rf"commit 9: .* {LIMIT} times .* 1 steps", str(error))
        assert re.search("Rank 0 .* 6 s, .* 3 s ", str(error))
        assert "recover.paused()" in str(error) and "--hang-timeout" in str(error)


def test_ranks_that_are_out_of_step_are_told_so_and_nobody_is_called_busy(
    page: Page, caplog: pytest.LogCaptureFixture
) -> None:
    def body(process: Process) -> BaseException | None:
        rank = Rank(process.world)
        missing = {0: ["b"], 1: ["a"]} if process.world.rank() == 0 else {}  # as Horovod tells rank 0 only
        for _ in range(LIMIT + 1):
            after = 6.5 if process.world.rank() == 0 else 3.2
            rank.fault(after, Reading(Phase.TRAINING, silent=after, steps=1, commit=9), missing=missing)
            try:
                rank.rollbacks.compare()
            except NoProgressError as error:
                return error
        return None

    errors = on_ranks(2, body)
    known = "rank 0 in a; rank 1 in b"
    assert len({str(error) for error in errors}) == 1
    assert known in str(errors[0]) and "busy" not in str(errors[0]) and "paused" not in str(errors[0])
    assert len([message for message in caplog.messages if known in message]) == 1
    assert not any("busy" in message for message in caplog.messages)
    assert heartbeat.longest() == (0.0, 0.0)  # nothing is learnt that would have a real hang found later


def test_what_was_learnt_counts_at_once(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for as long as their guardians allow, which look at the page now and then."""
    allowed: list[list[int]] = []
    monkeypatch.setattr(heartbeat, "_notes", 2)
    monkeypatch.setattr(liveness, "_allowed", 3)

    def guardian_looks(seconds: float) -> None:
        page.allow_stalls(0, 12)

    monkeypatch.setattr(heartbeat.time, "sleep", guardian_looks)

    def body(process: Process) -> None:
        rank = Rank(process.world)
        after = 6.5 if process.world.rank() == 0 else 3.2
        rank.fault(after, Reading(Phase.TRAINING, silent=after))
        rank.rollbacks.compare()
        process.world.allgather([0], "as in an agreement")
        if process.world.rank() == 0:
            heartbeat.resume()
            rank.rollbacks.agreed()
            allowed.append(process.world.allowed)

    on_ranks(2, body)
    assert allowed == [[12]]


# -- in jobs -----------------------------------------------------------------------------------------------


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
        assert caught.value.commit == 2 + at_the_top * (1 + LIMIT)  # of steps 2 and 4, and of each call
        return calls

    return body


@pytest.mark.parametrize("at_the_top", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_a_collective_that_always_fails_ends_the_job(size: int, at_the_top: bool) -> None:
    results = on_ranks(size, always_failing(10, 5, at_the_top=at_the_top))
    assert results == [[0] + [4] * LIMIT] * size


def test_a_job_that_gets_a_little_farther_each_time_is_left_alone() -> None:
    def body(process: Process) -> int:
        state, calls = process.state(step=0), []

        @run
        def train(state: State) -> None:
            calls.append(state.step)
            while state.step < 10:
                state.step += 1
                process.world.allgather([1], "step")
                state.commit()
                if len(calls) < 3 * LIMIT and state.step >= len(calls):
                    raise HorovodInternalError("the network is not well")

        train(state)
        return len(calls)

    assert on_ranks(2, body) == [3 * LIMIT] * 2


def test_ranks_that_are_lost_again_and_again_are_not_counted_here() -> None:
    """Their guardians and the supervisor count them."""
    faults = [fail_at(1, "gradient", 1, replacement="in_place") for _ in range(3 * LIMIT)]
    reached: list[int] = []

    def body(process: Process) -> str:
        state = process.state(step=0)

        @run
        def train(state: State) -> str:
            while state.step < 2:
                state.step += 1
                process.world.allgather([1], "gradient")
                state.commit()
            reached.append(state.step)
            return "trained"

        return str(train(state))

    assert FakeJob(initialised(body), 2, faults).results() == ["trained"] * 2
    assert reached == [2, 2]


def test_hosts_that_come_and_go_are_no_faults() -> None:
    faults: list[Fault] = [change_at(0, "gradient", 1, add=1), change_at(0, "gradient", 3, remove=[2])]

    def body(process: Process) -> str:
        state = process.state(step=0)

        @run
        def train(state: State) -> str:
            while state.step < 4:
                process.world.allgather([1], "gradient")
                state.step += 1
                state.check_host_updates()
            return "trained"

        return str(train(state))

    outcomes = FakeJob(initialised(body), 2, faults).run()
    assert [outcome.result for outcome in outcomes if outcome.status == "returned"] == ["trained"] * 2
