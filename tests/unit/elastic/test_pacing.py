"""``interval="auto"``: what is measured, and what is decided from it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover import heartbeat
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.durable.costs import cost_of_write, mean_time_between_failures
from hvdrecover.elastic.durable.interval import Costs, best
from hvdrecover.elastic.durable.pacing import CHANGE, START, Decision, Pacing
from hvdrecover.elastic.state import State
from tests.fakes.clock import FakeClock
from tests.fakes.framework import FakeModel
from tests.fakes.root import FakeRoot, FakeRoots
from tests.fakes.world import HANG_SECONDS
from tests.unit.elastic.jobs import CONFIG, URL, Process, on_ranks

DAY = 86400.0
SECONDS = st.floats(0.0, 1e6)
STRETCHES = st.lists(st.floats(1e-3, 1e4), max_size=20)


@pytest.fixture
def root(roots: FakeRoots) -> FakeRoot:
    return roots[URL]


# -- estimates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "failures", "mtbf"),
    [(0.0, 0, DAY), (DAY, 0, 2 * DAY), (DAY, 1, DAY), (0.0, 3, DAY / 4), (9 * DAY, 99, DAY / 10)],
)
def test_failures_are_counted_on_top_of_one_a_day(seconds: float, failures: int, mtbf: float) -> None:
    assert mean_time_between_failures(seconds, failures) == mtbf


@pytest.mark.parametrize(
    ("clean", "beside", "per_write", "cost"),
    [
        ([1.0, 1.0, 1.0], [1.2, 1.2], [1], 0.2),
        ([1.0, 1.0, 1.0, 30.0], [1.2, 1.2, 60.0], [2, 2, 2], 0.4),  # one evaluation on each side
        ([1.0, 1.0, 1.0], [0.9], [5], 0.005),  # nothing, and so a hundredth of the write
        ([0.9, 1.0, 1.1, 1.0], [1.1, 1.1, 1.1], [1], 0.1 + 1.2533 * 1.4826 * 0.05 / 2),  # and its error
        ([1.0, 1.0, 1.0], [3.0], [1], 0.5),  # more than the write took
        ([1.0, 1.0], [1.2], [1], 0.5),  # too little to compare
        ([1.0, 1.0, 1.0], [], [], 0.5),
    ],
)
def test_a_write_costs_what_training_takes_longer_beside_it(
    clean: list[float], beside: list[float], per_write: list[int], cost: float
) -> None:
    assert cost_of_write(clean, beside, per_write, write=0.5) == pytest.approx(cost)


@given(STRETCHES, STRETCHES, st.lists(st.integers(1, 1000), max_size=9), st.floats(0.0, 100.0))
def test_a_write_costs_no_more_than_it_takes(
    clean: list[float], beside: list[float], per_write: list[int], write: float
) -> None:
    assert write / 100 <= cost_of_write(clean, beside, per_write, write) <= write


def test_costs_that_noise_hides_are_found_to_within_it() -> None:
    random = np.random.default_rng(1)
    found = []
    for _ in range(200):
        clean, beside = random.normal(1.0, 0.2, 64), random.normal(1.05, 0.2, 64)
        found.append(cost_of_write(clean.tolist(), beside.tolist(), [4], write=4.0))
    error = 4 * 1.2533 * 0.2 * math.sqrt(2 / 64)
    assert np.mean(found) == pytest.approx(0.2 + error, abs=5 * error / math.sqrt(200))
    assert np.mean(np.array(found) < 0.2) < 0.3  # one in six is to be expected


# -- decisions -----------------------------------------------------------------------------------------


def on(clock: FakeClock | None = None) -> Pacing:
    return Pacing(clock or FakeClock(), on=True)


def stretches(pacing: Pacing, clock: FakeClock, seconds: float, count: int, *, beside: bool = False) -> None:
    for _ in range(count):
        pacing.begin(beside=beside)
        clock.advance(seconds)
        pacing.end()


def a_write(pacing: Pacing, clock: FakeClock, *, seconds: float, slow: float, clean: float = 1.0) -> None:
    """Two stretches beside a write, and eight without one."""
    stretches(pacing, clock, slow, 2, beside=True)
    pacing.written(seconds)
    stretches(pacing, clock, clean, 8)


def decided(pacing: Pacing) -> Decision:
    decision = pacing.decide()
    assert decision is not None
    return decision


def test_nothing_is_decided_before_the_first_write() -> None:
    clock = FakeClock()
    pacing = on(clock)
    stretches(pacing, clock, 1.0, 50)
    assert pacing.decide() is None
    assert pacing.seconds == START


def test_a_write_is_taken_to_stop_training_until_that_can_be_told() -> None:
    pacing = on()
    pacing.written(20.0)
    first = decided(pacing)
    assert (first.seconds, first.reason, first.stall, first.restore) == (2000.0, "cap", 20.0, None)
    assert pacing.seconds == 2000.0


def test_the_decision_is_the_one_that_loses_least_by_what_was_measured() -> None:
    clock = FakeClock()
    pacing = on(clock)
    a_write(pacing, clock, seconds=0.5, slow=1.01)
    mtbf = DAY + 2 * 1.01 + 8 * 1.0
    expected = best(Costs(0.02, 0.0, mtbf), least=1.0)
    decision = decided(pacing)
    assert decision.stall == pytest.approx(0.02)
    assert decision.mtbf == pytest.approx(mtbf)
    assert (decision.seconds, decision.reason) == (pytest.approx(expected.seconds), "optimum")


def test_where_losses_are_frequent_half_of_the_time_is_without_a_write() -> None:
    clock = FakeClock()
    pacing = on(clock)
    pacing.load({"seconds": 0.0, "failures": 100_000})
    a_write(pacing, clock, seconds=0.5, slow=1.0)
    decision = decided(pacing)
    assert (decision.seconds, decision.reason, pacing.seconds) == (1.0, "least", 1.0)


@pytest.mark.parametrize(
    ("factor", "stands"),
    [(1.01 + CHANGE, False), (0.99 + CHANGE, True), (1.01 - CHANGE, True), (0.99 - CHANGE, False)],
)
def test_a_decision_stands_until_one_differs_by_a_fifth(factor: float, stands: bool) -> None:
    pacing = on()
    pacing.written(40.0)  # all of which counts as lost, and the cap decides
    assert decided(pacing).seconds == 4000.0
    for _ in range(3):  # the median is then that of the new ones
        pacing.written(40.0 * factor)
    assert (pacing.decide() is None) is stands
    assert pacing.seconds == pytest.approx(4000.0 * (1.0 if stands else factor))


def test_one_slow_write_changes_nothing() -> None:
    clock = FakeClock()
    pacing = on(clock)
    for _ in range(3):
        a_write(pacing, clock, seconds=0.5, slow=1.1)
        pacing.decide()
    before = pacing.seconds
    a_write(pacing, clock, seconds=30.0, slow=20.0)
    assert pacing.decide() is None
    assert pacing.seconds == before


def test_what_is_interrupted_does_not_count() -> None:
    clock = FakeClock()
    pacing = on(clock)
    pacing.begin(beside=True)
    clock.advance(1000.0)
    pacing.interrupt()
    pacing.end()
    a_write(pacing, clock, seconds=0.5, slow=1.05)
    assert decided(pacing).stall == pytest.approx(0.1)


def test_it_decides_anew_only_when_there_is_something_new() -> None:
    clock = FakeClock()
    pacing = on(clock)
    a_write(pacing, clock, seconds=0.5, slow=1.5)
    decided(pacing)
    clock.advance(1000 * DAY)  # which would change much
    stretches(pacing, clock, 1.0, 7)
    assert pacing.decide() is None
    stretches(pacing, clock, 1.0, 1)
    assert decided(pacing).mtbf > 1000 * DAY


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (
            Decision(49.5, "cap", 0.495, 0.6, None, DAY),
            "every 49.5 s from now on, as it may take 1% of the time: one costs training 0.49 s and takes "
            "0.6 s to write, and a loss of the whole job is reckoned with every 24 h",
        ),
        (Decision(49.5, "optimum", 0.1, 0.6, 3.0, DAY), "which loses least"),
        (Decision(1.2, "least", 0.0, 0.6, 3.0, DAY), "twice as long as a write takes"),
    ],
)
def test_what_people_are_told(decision: Decision, words: str) -> None:
    assert words in decision.describe()


# -- what a commit holds of it -------------------------------------------------------------------------


def test_time_and_failures_outlive_a_job() -> None:
    clock = FakeClock()
    first = on(clock)
    clock.advance(100.0)
    second = on(clock)
    second.load(second.resumed(first.capture()))
    clock.advance(50.0)
    assert second.capture() == {"seconds": 150.0, "failures": 1}
    second.load(second.capture())  # from a memory: nothing was lost
    assert second.capture() == {"seconds": 150.0, "failures": 1}


@pytest.mark.parametrize(
    "held",
    [
        None,
        3,
        {},
        {"seconds": "1", "failures": 1},
        {"seconds": math.nan, "failures": 1},
        {"seconds": -1.0, "failures": 1},
        {"seconds": math.inf},
    ],
)
def test_nonsense_counts_for_nothing(held: object) -> None:
    pacing = on()
    pacing.load(held)
    assert pacing.capture() == {"seconds": 0.0, "failures": 0}


def test_without_it_commits_hold_nothing_of_it() -> None:
    off = Pacing(FakeClock(), on=False)
    assert (off.capture(), off.resumed(None)) == (None, None)


# -- in a job ------------------------------------------------------------------------------------------


def begun(process: Process, tmp_path: Path | None = None) -> State:
    config = dataclasses.replace(CONFIG, events=tmp_path)
    state = process.state(Checkpoint(URL, interval="auto"), config=config, model=FakeModel(w=[0.0]), step=0)
    state.sync()
    return state


def intervals(folder: Path) -> list[dict[str, Any]]:
    return [event for event in events(folder) if event["kind"] == "interval"]


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]


def train(process: Process, state: State, root: FakeRoot, steps: int) -> list[float]:
    """Steps of 1 s, each with a commit, and a tenth longer beside a write, which continues for two of them.

    Returns:
        When durable commits were begun, in seconds.
    """
    begun, beside = [], 0
    for _ in range(steps):
        process.clock.advance(1.1 if beside else 1.0)
        beside = max(0, beside - 1)
        if beside == 0 and state._durable._writing is not None:
            root.gate.set()
            state._durable._writing.writer.wait()
            assert state._durable._writing.writer.wait_for_cleanup(HANG_SECONDS)
            root.gate.clear()
        state.step += 1
        state.commit()
        assert state._durable._writing is not None
        if beside == 0 and state._durable._writing.writer.in_flight is not None:
            assert root.at_the_gate.wait(HANG_SECONDS)
            begun.append(process.clock.monotonic())
            beside = 2
    return begun


def test_a_job_finds_its_interval_and_keeps_to_it(
    process: Process, root: FakeRoot, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "hvdrecover")
    state = begun(process, tmp_path)
    started = process.clock.monotonic()
    times = train(process, state, root, 1000)
    root.gate.set()
    assert times[0] - started == 1.0  # the first commit is durable
    assumed, found = intervals(tmp_path)
    assert [assumed[name] for name in ("stall", "write")] == pytest.approx([2.2, 2.2])
    assert [found[name] for name in ("stall", "write")] == pytest.approx([0.2, 2.2])
    assert found["seconds"] == best(Costs(found["stall"], 0.0, found["mtbf"]), least=4.4).seconds
    assert [found[name] for name in ("restore", "cap", "reason")] == [None, 0.01, "optimum"]
    assert DAY < found["mtbf"] < DAY + 20.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(gaps) == 5
    assert all(found["seconds"] <= gap < found["seconds"] + 1.1 for gap in gaps)
    assert sum("commits become durable every" in message for message in caplog.messages) == 2


def test_only_rank_0_decides(root: FakeRoot, tmp_path: Path) -> None:
    def body(process: Process) -> float:
        state = begun(process, tmp_path / str(process.world.rank()))
        for _ in range(3):
            process.clock.advance(1.0)
            state.commit(durable=True)
            state.flush()
        return state._durable._pacing.seconds

    assert on_ranks(2, body) == [0.0, START]  # writes took no time by this clock
    assert len(intervals(tmp_path / "0")) == 1
    assert intervals(tmp_path / "1") == []


def test_a_start_from_a_durable_commit_is_a_failure_on_all_ranks(root: FakeRoot) -> None:
    def counted(process: Process) -> Any:
        state = begun(process)
        process.clock.advance(30.0)
        state.commit(durable=True)
        state.flush()
        assert state._memory.newest is not None
        return state._memory.newest.state["pacing"]

    assert on_ranks(2, counted) == [{"seconds": 30.0, "failures": 0}] * 2
    assert on_ranks(2, counted) == [{"seconds": 60.0, "failures": 1}] * 2
    assert on_ranks(2, counted) == [{"seconds": 90.0, "failures": 2}] * 2


def test_the_time_of_a_start_is_that_to_restore(process: Process, roots: FakeRoots) -> None:
    first = begun(process)
    first.commit(durable=True)
    first.flush()
    heartbeat.stepped()
    assert first._durable._pacing._restore is None
    process.end()
    second = begun(process)
    process.clock.advance(7.0)
    heartbeat.stepped()  # the first step
    assert second._durable._pacing._restore == 7.0


def test_commits_say_for_how_long_they_stalled(process: Process, root: FakeRoot, tmp_path: Path) -> None:
    class SlowModel(FakeModel):
        def state_dict(self) -> dict[str, object]:
            process.clock.advance(0.25)
            held: dict[str, object] = super().state_dict()
            return held

    config = dataclasses.replace(CONFIG, events=tmp_path)
    state = process.state(Checkpoint(URL), config=config, model=SlowModel(w=[0.0]))
    state.sync()
    state.commit()
    (commit,) = [event for event in events(tmp_path) if event["kind"] == "commit"]
    assert commit["stall"] >= 0.25
