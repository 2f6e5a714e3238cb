"""The page of a run, and its time line."""

from __future__ import annotations

import pytest

from hvdrecover import record
from hvdrecover.reporting import timeline
from hvdrecover.reporting.summary import Run
from tests.unit.reporting.runs import TWO
from tests.unit.reporting.runs import Run as Written


def drawn(run):
    followed = Run(record.read(run.folder))
    report = followed.report()
    return timeline.draw(followed, report, timeline.trace(followed, report))


# -- the time line -------------------------------------------------------------------------------------


def test_thousands_of_commits_are_thinned_out_and_durable_ones_stay(tmp_path):
    run = Written(tmp_path)
    run.rendezvous(0, {0: TWO[0]}, 1, 0, "initial")
    run.commit({0: TWO[0]}, 1, {number: number for number in range(1, 3000)})
    run.report(1500, "durable", pid=10, generation=1, commit=1500, bytes=1, seconds=1)
    text = drawn(run)
    assert 100 < text.count('<line class="commit"') <= 200
    assert text.count('<line class="durable"') == 1


@pytest.mark.parametrize("length", [0.0, 0.02, 7.0, 104.0, 5000.0, 90_000.0, 3e6, 9e7])
def test_ticks_are_few_round_and_told_apart(length):
    found = timeline.ticks(length)
    assert 1 <= len(found) <= 8
    assert len({text for _, text in found}) == len(found)
    assert all(0 <= time <= length for time, _ in found)
