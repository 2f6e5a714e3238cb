"""Marks of time."""

from __future__ import annotations

import pytest

from hvdrecover.elastic.scalars.times import Step, Times
from tests.fakes.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def times(clock: FakeClock) -> Times:
    return Times(clock)


def commit(times: Times, clock: FakeClock, seconds: float) -> float:
    began = clock.monotonic()
    clock.advance(seconds)
    return times.committed(began)


def test_the_parts_of_a_step(times: Times, clock: FakeClock) -> None:
    clock.advance(1)
    times.fetched()
    clock.advance(2)
    times.waiting()
    clock.advance(4)
    times.arrived()
    clock.advance(8)
    assert times.stepped() == Step(15, data_wait=1, allreduce_wait=4)


def test_what_nobody_has_seen_is_unknown(times: Times, clock: FakeClock) -> None:
    clock.advance(3)
    assert times.stepped() == Step(3, data_wait=None, allreduce_wait=None)


def test_each_step_begins_anew(times: Times, clock: FakeClock) -> None:
    for seconds in (1, 2):
        clock.advance(seconds)
        times.fetched()
        times.waiting()
        clock.advance(seconds)
        times.arrived()
        assert times.stepped() == Step(2 * seconds, seconds, seconds)
    clock.advance(5)
    assert times.stepped() == Step(5, None, None)


def test_only_the_first_call_of_a_model_ends_the_wait_for_data(times: Times, clock: FakeClock) -> None:
    for _ in range(3):
        clock.advance(1)
        times.fetched()
    assert times.stepped() == Step(3, data_wait=1, allreduce_wait=None)


def test_waits_add_up(times: Times, clock: FakeClock) -> None:
    for _ in range(2):
        times.waiting()
        clock.advance(1)
        times.waiting()  # already
        clock.advance(1)
        times.arrived()
        times.arrived()  # already
        clock.advance(10)
    times.waited(0.5)
    assert times.stepped().allreduce_wait == 4.5


def test_what_somebody_else_has_seen_of_the_data_does_not_count_twice(times: Times, clock: FakeClock) -> None:
    clock.advance(4)
    times.waited_for_data(1)
    times.waited_for_data(2)
    assert times.stepped().data_wait == 3
    clock.advance(4)
    times.fetched()
    times.waited_for_data(1)
    assert times.stepped().data_wait == 4


def test_steps_that_end_at_once_share_the_time(times: Times, clock: FakeClock) -> None:
    clock.advance(8)
    times.waited(4)
    times.waited_for_data(2)
    assert times.stepped(4) == Step(2, data_wait=0.5, allreduce_wait=1)


def test_a_commit_is_in_no_step_and_no_wait(times: Times, clock: FakeClock) -> None:
    clock.advance(1)
    times.stepped()
    clock.advance(1)
    assert commit(times, clock, 100) == 100
    clock.advance(2)
    times.fetched()
    clock.advance(4)
    assert times.stepped() == Step(7, data_wait=2, allreduce_wait=None)
    clock.advance(1)
    assert times.stepped().whole == 1


def test_what_was_before_a_stretch_is_in_no_step(times: Times, clock: FakeClock) -> None:
    times.fetched()
    times.waiting()
    clock.advance(100)
    times.begin()
    clock.advance(1)
    assert times.stepped() == Step(1, None, None)
    assert times.take_busy() == 1


def test_work_is_what_is_no_wait_for_others(times: Times, clock: FakeClock) -> None:
    for _ in range(2):
        clock.advance(3)
        times.waiting()
        clock.advance(10)
        times.arrived()
        times.stepped()
    commit(times, clock, 100)
    assert times.take_busy() == 6
    assert times.take_busy() == 0


def test_which_step_is_under_way(times: Times) -> None:
    assert times.under_way  # the first one
    times.stepped()
    assert not times.under_way
    times.fetched()
    assert times.under_way
    times.stepped()
    times.begin()
    assert times.under_way
