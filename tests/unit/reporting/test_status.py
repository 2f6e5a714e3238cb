"""The status of a run that is under way."""

from __future__ import annotations

import random

import pytest

from hvdrecover import record
from hvdrecover.record import Follower
from hvdrecover.reporting import summary
from hvdrecover.reporting.summary import Outage
from tests.unit.reporting.runs import BEGIN, example
from tests.unit.reporting.runs import Run as Written


@pytest.fixture
def run(tmp_path):
    return Written(tmp_path)


@pytest.fixture
def status(tmp_path):
    """The status so far; each call reads the new events."""
    follower, run = Follower(tmp_path), summary.Run()

    def look():
        for event in follower.look():
            run.take(event)
        return run.report()

    return look


def test_outages(run, status):
    told = {"pid": 10, "generation": 1}
    run.report(1, "durable", commit=1, bytes=1, seconds=0.1, **told)
    run.report(2, "write_failed", commit=2, error="full", attempt=1, **told)
    run.report(2.1, "outage", commit=2, error="full", age=1.0, **told)
    assert status().storage.outage == Outage(BEGIN + 2, "full")
    run.report(5, "write_failed", commit=2, error="gone", attempt=2, **told)
    assert status().storage.outage == Outage(BEGIN + 2, "gone")
    run.report(7, "durable", commit=3, bytes=1, seconds=0.1, **told)
    run.report(7, "outage_over", commit=3, attempts=2, seconds=4.9, age=6.0, **told)
    found = status().storage
    assert (found.outage, found.outages, found.outage_seconds, found.failures) == (None, 1, 4.9, 2)
    run.report(8, "write_failed", commit="g0001-c00000001", error="a mark", pid=10)
    assert status().storage.outage is None
    run.report(
        9, "write_failed", commit=4, error="fenced", attempt=1, **told
    )  # permanently, without an outage
    assert status().storage.outage == Outage(BEGIN + 9, "fenced")


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_was_followed_is_reported_as_one_that_is_read_at_once(tmp_path, seed):
    """Events of different processes arrive in any order within a short time."""
    example(tmp_path)
    events = record.read(tmp_path)
    shaken = random.Random(seed)
    late = sorted(events, key=lambda event: event.time + (shaken.uniform(0, 0.04) if event.pid != 10 else 0))
    followed = summary.Run()
    for event in late:
        followed.take(event)
    assert followed.report() == summary.Run(events).report()
