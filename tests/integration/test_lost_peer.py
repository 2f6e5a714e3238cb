"""Survivors whose connections break in a way at which Gloo, unedited, aborts or waits."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdrecover.examples.digits_run import PATIENCE, ROOT_MAY_USE_MPI, supervised
from hvdrecover.launch.job import Job

SCRIPT = Path(__file__).with_name("scripts") / "lost_peer.py"
SETTINGS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(10 * PATIENCE)}  # nobody is told of a loss by a time-out


def test_a_survivor_is_neither_aborted_nor_left_waiting(tmp_path: Path) -> None:
    command = [*supervised("--no-standby"), sys.executable, str(SCRIPT), str(tmp_path)]
    job = Job(command, tmp_path / "log", {**ROOT_MAY_USE_MPI, **SETTINGS})
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    survivor, lost = ((tmp_path / f"starts-{rank}").read_text().split() for rank in range(2))
    assert (len(survivor), len(lost)) == (3, 3), job.tail()
    assert (len(set(survivor)), len(set(lost))) == (1, 2), job.tail()
