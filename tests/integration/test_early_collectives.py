"""Collectives before the training function, when a process rejoins the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.scripts.early_collectives import RATE, STEPS
from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, Job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "early_collectives.py"


def run(folder: Path, *arguments: str) -> str:
    """Run the script to its end; return its log."""
    environ = {"HVDRECOVER_CHECKPOINT": str(folder / "root"), "HVDRECOVER_EVENTS": str(folder / "events")}
    words = [sys.executable, str(SCRIPT), *arguments]
    job = Job([*supervised("--no-standby"), *words], folder / "log", {**ROOT_MAY_USE_MPI, **environ})
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    assert (folder / "lost").exists()
    return job.log.read_text()


def undisturbed(momentum: float) -> list[float]:
    """The weights that start at rank 0's and get the same gradient in each step."""
    weight, moment = 1.0, 0.0
    for _ in range(STEPS):
        moment = momentum * moment + 1.0
        weight -= RATE * moment
    return [weight] * 2


@pytest.mark.parametrize(("framework", "momentum"), [("torch", 0.5), ("tensorflow", 0.0)])
def test_a_process_that_rejoins_skips_broadcasts_of_what_the_state_brings(
    framework: str, momentum: float, tmp_path: Path
) -> None:
    log = run(tmp_path, framework, str(tmp_path))
    weights = [[float(each) for each in (tmp_path / str(rank)).read_text().split()] for rank in range(2)]
    assert weights == [undisturbed(momentum)] * 2, log
    assert log.count("hvd.broadcast_object() before the training function") == 1
    assert "resuming from commit 2 in memory" in log


def test_another_collective_has_the_whole_job_start_again_and_says_which(tmp_path: Path) -> None:
    log = run(tmp_path, "torch", str(tmp_path), "allreduce")
    assert "hvd.allreduce() before the training function" in log
    assert (tmp_path / "1").read_text().split() == [str(each) for each in undisturbed(0.5)]
