"""The history: the activity of each rank over time."""

from __future__ import annotations

import pytest

from hvdrecover import events
from hvdrecover.reporting import page, summary
from tests.unit.reporting.runs import BEGIN, PHASES, REPLACED, TWO, Run, example


def trace(run):
    followed = summary.Run(events.read(run.folder))
    return page.trace(followed, followed.report())


def lane(run, rank=0):
    """Activity, begin and end of each stretch of a rank."""
    return [
        (
            each.activity,
            pytest.approx(each.begin - BEGIN, abs=1e-3),
            pytest.approx(each.end - BEGIN, abs=1e-3),
        )
        for each in trace(run)[rank]
    ]


def test_the_run_of_the_documentation(tmp_path):
    run = example(tmp_path)
    found = trace(run)
    assert list(found) == [0, 1]
    assert lane(run, 1) == [
        ("starting", 0, 4),
        ("training", 4, 36),
        ("recovery", 36, 36.31),
        ("training", 36.31, 60),
        ("recovery", 60, 82.71),  # a hang began when the process fell silent
        ("training", 82.71, 103),
    ]
    recovery = found[1][2]
    assert (recovery.host, recovery.generation, recovery.commit) == ("node-2", 2, 3)
    assert recovery.phases == PHASES


def test_nothing_is_drawn_between_the_end_of_a_job_and_its_next_start(run):
    run.fault(40, "preemption", slot=None)
    run.report(45, "end", pid=5, code=75, reason="preempted")
    run.report(100, "start", pid=6, attempt=1, command=["python"])
    run.rendezvous(104, REPLACED, 2, 3, "durable")
    run.step(105, REPLACED, 2, 3)
    run.finish(110, REPLACED, 2, 4)
    assert lane(run)[1:] == [
        ("training", 4, 40),
        ("starting", 100, 105),
        ("training", 105, 110),
    ]


def test_a_job_that_was_killed_as_a_whole_is_drawn_up_to_its_last_sign(run):
    run.report(100, "start", pid=6, attempt=1, command=["python"])
    run.rendezvous(104, REPLACED, 2, 3, "durable")
    run.step(105, REPLACED, 2, 3)
    run.finish(110, REPLACED, 2, 4)
    assert lane(run)[1:3] == [("training", 4, 34), ("starting", 100, 105)]


def test_thousands_of_commits_are_thinned_out_and_durable_ones_stay(tmp_path):
    run = Run(tmp_path)
    run.rendezvous(0, {0: TWO[0]}, 1, 0, "initial")
    run.commit({0: TWO[0]}, 1, {number: number for number in range(1, 3000)})
    run.report(1500, "durable", pid=10, generation=1, commit=1500, bytes=1, seconds=1)
    followed = summary.Run(events.read(run.folder))
    report = followed.report()
    text = page.Drawing(followed, report, page.trace(followed, report)).html()
    assert 100 < text.count('<line class="commit"') <= 200
    assert text.count('<line class="durable"') == 1


@pytest.mark.parametrize("length", [0.0, 0.02, 7.0, 104.0, 5000.0, 90_000.0, 3e6, 9e7])
def test_ticks_are_few_round_and_told_apart(length):
    found = page.ticks(length)
    assert 1 <= len(found) <= 8
    assert len({text for _, text in found}) == len(found)
    assert all(0 <= time <= length for time, _ in found)
