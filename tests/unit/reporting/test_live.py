"""The status of a run that is under way."""

from __future__ import annotations

import dataclasses
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdrecover.reporting.following import Follower
from hvdrecover.reporting.live import Live
from hvdrecover.reporting.status import RECENT, Outage
from tests.unit.reporting.runs import BEGIN, REPLACED, TWO, Run, example


def status_of(folder):
    """Return what reading a folder at once gives."""
    follower, live = Follower(folder), Live()
    for file, event in follower.look():
        live.take(file, event)
    assert not follower.behind
    return live.status()


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


@pytest.fixture
def status(tmp_path):
    """The status so far; what is new is read at each call."""
    follower, live = Follower(tmp_path), Live()

    def look():
        for file, event in follower.look():
            live.take(file, event)
        return live.status()

    return look


def test_before_the_first_event_there_are_none(status):
    assert status() is None


def test_a_run_from_its_start_to_its_end(run, status):
    run.report(0, "start", pid=5, attempt=1, command=["x"])
    assert (status().activity, status().commit, status().rate(BEGIN + 9)) == ("starting", None, None)
    run.rendezvous(4, TWO, 1, 0, "initial")
    found = status()
    assert (found.activity, found.agreement.ranks, found.commit.number) == ("training", 2, 0)
    run.commit(TWO, 1, {1: 14, 2: 24, 3: 34})
    found = status()
    assert (found.commit.generation, found.commit.number, found.commit.time) == (1, 3, BEGIN + 34)
    assert (found.commits, found.recent) == (3, tuple(BEGIN + second for second in (14, 24, 34)))
    assert found.rate(BEGIN + 34) == pytest.approx(0.1)
    assert found.rate(BEGIN + 54) == pytest.approx(0.05)
    run.fault(36, "crash", host="node-2", rank=1, commit=[1, 3], steps=4)
    assert (status().activity, status().faults[0].recovery) == ("recovering", None)
    run.report(36.01, "restart", "node-2", 9, 1, scope="slot", warm=True, attempt=1)
    run.rendezvous(36.25, REPLACED, 2, 3)
    run.step(36.3, REPLACED, 2, 3)
    found = status()
    assert (found.activity, found.agreement.generation) == ("training", 2)
    assert found.faults[0].recovery.seconds == pytest.approx(0.31)
    assert (found.restarts, found.warm, found.steps_repeated) == (1, 1, 4)
    run.finish(40, REPLACED, 2, 3)
    assert (status().activity, status().over) == ("finished", False)  # its supervisor has yet to leave
    run.report(41, "end", pid=5, code=0, reason="finished")
    assert (status().over, status().last) == (True, BEGIN + 41)


def test_without_a_supervisor_a_finished_run_is_over(run, status):
    run.rendezvous(4, TWO, 1, 0, "initial")
    assert not status().over
    run.finish(9, TWO, 1, 3)
    assert status().over


def test_a_start_that_ended_and_the_next(run, status):
    run.report(0, "start", pid=5, attempt=1, command=[])
    run.rendezvous(1, TWO, 1, 0)
    run.commit(TWO, 1, {1: 2, 2: 3})
    run.report(4, "gave_up", pid=5, scope="job", reason="no restarts left")
    run.report(5, "end", pid=5, code=3, reason="gave up")
    found = status()
    assert (found.activity, found.over, found.ending.code) == ("ended", True, 3)
    assert found.given_up == ("the job: no restarts left",)
    run.report(9, "start", pid=6, attempt=1, command=[])
    assert (status().activity, status().over, status().starts) == ("starting", False, 2)
    again = {0: ("node-1", 30), 1: ("node-2", 31)}
    run.rendezvous(11, again, 1, 0, "initial")  # it counts from an earlier generation again
    run.commit(again, 1, {1: 12})
    found = status()
    assert (found.activity, found.commit.number, found.commits) == ("training", 1, 3)


def test_durable_commits(run, status):
    run.rendezvous(1, TWO, 1, 0)
    assert (status().durable, status().durables) == (None, 0)
    run.report(8, "durable", pid=10, generation=1, commit=5, bytes=100, seconds=2.5)
    run.report(9, "durable", pid=10, generation=1, commit=6, bytes=50, seconds=0.5)
    found = status()
    assert (found.durable.number, found.durable.time) == (6, BEGIN + 8.5)
    assert (found.durables, found.durable_bytes, found.durable_seconds) == (2, 150, 3.0)


def test_outages(run, status):
    told = {"pid": 10, "generation": 1}
    run.report(1, "durable", commit=1, bytes=1, seconds=0.1, **told)
    run.report(2, "write_failed", commit=2, error="full", attempt=1, **told)
    run.report(2.1, "outage", commit=2, error="full", age=1.0, **told)
    assert status().outage == Outage(BEGIN + 2.1, "full")
    run.report(5, "write_failed", commit=2, error="gone", attempt=2, **told)
    assert status().outage == Outage(BEGIN + 2.1, "gone")
    run.report(7, "durable", commit=3, bytes=1, seconds=0.1, **told)
    run.report(7, "outage_over", commit=3, attempts=2, seconds=4.9, age=6.0, **told)
    found = status()
    assert (found.outage, found.outages, found.outage_seconds, found.write_failures) == (None, 1, 4.9, 2)
    run.report(8, "write_failed", commit="g0001-c00000001", error="a mark", pid=10)
    assert status().outage is None
    run.report(9, "write_failed", commit=4, error="fenced", attempt=1, **told)  # for good, without an outage
    assert status().outage == Outage(BEGIN + 9, "fenced")


def test_the_epoch_is_the_newest_that_any_sampler_names(run, status):
    run.report(1, "tail", sampler="train", epoch=3, padding=1, dropped=0)
    run.report(2, "tail", sampler="validation", epoch=0, padding=1, dropped=0)
    assert status().epoch == 3
    run.report(3, "tail", sampler="train", epoch=2, padding=1, dropped=0)  # rolled back
    assert status().epoch == 2


def test_a_wrong_clock_is_corrected(tmp_path):
    example(tmp_path, {"node-2": 90.0})
    found = status_of(tmp_path)
    assert (found.last, found.commit.time) == (BEGIN + 104, BEGIN + 102)
    assert found.agreement.time == pytest.approx(BEGIN + 82.6)
    assert [fault.recovery.seconds for fault in found.faults] == [pytest.approx(0.31), pytest.approx(22.71)]


def test_the_order_in_which_files_are_read_does_not_matter(tmp_path):
    run = Run(tmp_path)
    for host in ("node-1", "node-2"):
        run.fault(1, host=host)
    lines = Follower(tmp_path).look()
    assert len(lines) == 2
    one, other = Live(), Live()
    for file, event in lines:
        one.take(file, event)
    for file, event in reversed(lines):
        other.take(file, event)
    assert one.status() == other.status()


def test_weeks_of_commits_take_no_memory(run, status):
    run.rendezvous(1, TWO, 1, 0)
    run.commit(TWO, 1, {commit: commit for commit in range(1, 2000)})
    found = status()
    assert (found.commits, found.commit.number) == (1999, 1999)
    assert found.recent == tuple(BEGIN + commit for commit in range(2000 - RECENT, 2000))


def test_commits_alone_need_no_new_summary(run, tmp_path, monkeypatch):
    live, follower = Live(), Follower(tmp_path)
    run.rendezvous(1, TWO, 1, 0)
    run.commit(TWO, 1, {commit: commit for commit in range(1, 50)})
    for file, event in follower.look():
        live.take(file, event)
    live.status()
    monkeypatch.setattr("hvdrecover.reporting.live.summarise", None)  # whoever calls it fails
    run.commit(TWO, 1, {50: 50})
    run.report(51, "durable", pid=10, generation=1, commit=50, bytes=100, seconds=2.5)
    for file, event in follower.look():
        live.take(file, event)
    assert (live.status().commit.number, live.status().durable.number) == (50, 50)


def random_run(draw, folder):
    """A run with faults, long stretches of commits, outages, several starts, odd clocks and garbage."""
    run = Run(folder, {"node-2": draw.choice([0.0, 0.0, 90.0, -7.0])})
    time, generation, commit = 0.0, 0, 0
    for start in range(draw.randint(1, 2)):
        run.report(time, "start", pid=500 + start, attempt=1, command=[])
        ranks = {0: ("node-1", 100 * start + 10), 1: ("node-2", 100 * start + 20)}
        for rendezvous in range(draw.randint(1, 4)):
            time, generation = time + draw.choice([0.25, 5.0]), generation + 1
            run.rendezvous(time, ranks, generation, commit, "memory")
            if draw.random() < 0.9:
                run.step(time + 0.1, ranks, generation, commit)
            made = {
                commit + n: time + n * draw.choice([0.1, 1.0]) for n in range(1, draw.choice([0, 3, 40]) + 1)
            }
            run.commit(ranks, generation, made)
            time, commit = max([time, *made.values()]), max([commit, *made])
            if draw.random() < 0.5:
                told = {"pid": ranks[0][1], "generation": generation, "commit": commit}
                run.report(
                    time, draw.choice(["durable", "outage"]), **told, bytes=7, seconds=0.1, error="away"
                )
            if draw.random() < 0.3:
                run.report(
                    time, "tail", pid=ranks[0][1], sampler="train", epoch=rendezvous, padding=1, dropped=0
                )
            host, pid = ranks[victim := draw.randint(0, 1)]
            run.fault(
                time, draw.choice(["crash", "hang"]), host, victim, commit=[generation, commit], silent=1.0
            )
            run.report(time, "restart", host, 9, victim, scope="slot", warm=draw.random() < 0.5, attempt=1)
            ranks = {**ranks, victim: (host, pid + 1)}
            if draw.random() < 0.3:
                commit = draw.randint(0, commit)
        if draw.random() < 0.7:
            run.report(time, "end", pid=500 + start, code=draw.choice([0, 3]), reason="over")
        time += 2
    for path in folder.iterdir():
        lines = path.read_bytes().splitlines(keepends=True)
        if draw.random() < 0.3:
            lines.insert(draw.randint(0, len(lines)), draw.choice([b"\n", b"nonsense\n", b'{"time": 1\n']))
        path.write_bytes(b"".join(lines))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_is_appended_when_the_numbers_are_those_of_reading_at_once(seed):
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        whole, grown = Path(name, "whole"), Path(name, "grown")
        random_run(draw, whole)
        grown.mkdir()
        left = {path.name: path.read_bytes() for path in whole.iterdir()}
        follower, live = Follower(grown), Live()
        while left:
            file = draw.choice(sorted(left))
            size = draw.choice([1, 50, 1000, 10_000])
            with (grown / file).open("ab") as output:
                output.write(left[file][:size])
            if rest := left.pop(file)[size:]:
                left[file] = rest
            if draw.random() < 0.5:
                for path, event in follower.look():
                    live.take(path, event)
                live.status()
        for path, event in follower.look():
            live.take(path, event)
        assert dataclasses.asdict(live.status()) == dataclasses.asdict(status_of(whole))
