"""A job that chooses by itself how often its commits become durable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdrecover.state.interval import best
from tests.integration.conftest import ONE_OPTIMIZER, Start
from tests.integration.test_kill_and_resume import SLOW, assert_each_sample_once, assert_same_weights
from tests.support.jobs import DigitsRun, durable, read_events, static

SCRIPT = Path(__file__).with_name("scripts") / "auto_interval.py"
DAY = 86400.0


def events(run: DigitsRun, kind: str) -> list[dict[str, Any]]:
    return read_events(run.folder / "events", kind)


def decided_in(run: DigitsRun) -> bool:
    """Return whether it has chosen, and can be resumed."""
    return "commits become durable every" in run.log and durable(run.root) > 0


@ONE_OPTIMIZER
def test_it_decides_says_so_and_resumes_bitwise_equal(
    undisturbed: tuple[str, DigitsRun], start: Start, tmp_path: Path
) -> None:
    optimizer, clean = undisturbed
    run = DigitsRun(tmp_path, clean.epochs, "--optimizer", optimizer, *SLOW, program=[str(SCRIPT)])
    job = start(run, static(2))
    # In mid-epoch.
    run.wait_for(job, lambda batch: batch.epoch == 1 and batch.commit >= 12 and decided_in(run))
    job.kill()
    before = len(events(run, "interval"))
    run.finish(start(run, static(2)))
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)

    decisions = events(run, "interval")
    assert 0 < before < len(decisions)
    assert {event["rank"] for event in decisions} == {0}
    assert run.log.count("commits become durable every") == len(decisions)
    for event in decisions:
        seconds, reason = best(event["stall"], event["mtbf"], least=2 * event["write"], cap=event["cap"])
        assert (event["seconds"], event["reason"]) == (pytest.approx(seconds), reason)
        assert 0.0 <= event["stall"] <= event["write"]
    first, last = decisions[0], decisions[-1]
    assert first["mtbf"] >= DAY  # nothing has failed yet
    assert DAY / 2 <= last["mtbf"] < DAY  # the job was lost once
    assert first["restore"] is None
    assert last["restore"] > 0.0
    assert all(event["stall"] > 0.0 for event in events(run, "commit"))
