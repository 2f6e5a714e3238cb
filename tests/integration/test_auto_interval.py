"""A job that chooses by itself how often its commits become durable."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdrecover.state.interval import best
from tests.integration.conftest import Finished, Start
from tests.support.faulty_run import assert_each_sample_once, assert_same_weights
from tests.support.jobs import DigitsRun, durable, static

SCRIPT = """
import hvdrecover.torch as recover
from hvdrecover.examples import torch_digits
fixed = torch_digits.options
def options(*arguments):
    chosen = fixed(*arguments)
    chosen.checkpoint = recover.Checkpoint(chosen.checkpoint, interval="auto")
    return chosen
torch_digits.options = options
torch_digits.main()
"""
DAY = 86400.0


def decided_in(run: DigitsRun) -> bool:
    """Return whether it has chosen, and can be resumed."""
    return "commits become durable every" in run.log and durable(run.root) > 0


def test_it_decides_says_so_and_resumes_bitwise_equal(
    finished: Finished, start: Start, tmp_path: Path
) -> None:
    clean = finished(3, "torch", "--optimizer", "adamw")
    run = DigitsRun(tmp_path, 3, *clean.options, "--step-seconds", "0.04", program=["-c", SCRIPT])
    job = start(run, static(2))
    # In mid-epoch.
    run.wait_for(job, lambda batch: batch.epoch == 1 and batch.commit >= 12 and decided_in(run))
    job.kill()
    before = len(run.events("interval"))
    run.finish(start(run, static(2)))
    assert_same_weights(run, clean)
    assert_each_sample_once(run, padding=1)

    decisions = run.events("interval")
    assert 0 < before < len(decisions)
    assert {event["rank"] for event in decisions} == {0}
    assert run.log.count("commits become durable every") == len(decisions)
    for event in decisions:
        assert event["seconds"] == pytest.approx(best(event["stall"], event["mtbf"], event["write"]))
        assert 0.0 <= event["stall"] <= event["write"]
    first, last = decisions[0], decisions[-1]
    assert first["mtbf"] >= DAY  # nothing has failed yet
    assert DAY / 2 <= last["mtbf"] < DAY  # the job was lost once
    assert all(event["stall"] > 0.0 for event in run.events("commit"))
