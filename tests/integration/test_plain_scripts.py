"""A script for plain Horovod, unchanged, with its own checkpoints: all its ranks restart together."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support.gates import GatedRun
from tests.support.jobs import PATIENCE, PREEMPTED, ROOT_MAY_USE_MPI, kill

SCRIPT = Path(__file__).with_name("scripts") / "plain.py"

pytestmark = pytest.mark.acceptance


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[GatedRun]:
    run = GatedRun(SCRIPT, tmp_path, "--no-standby")
    yield run
    run.kill()


def test_it_ends_with_the_same_weights_after_a_kill_a_hang_and_a_kill_of_all(
    gated: GatedRun, tmp_path: Path
) -> None:
    undisturbed = GatedRun(SCRIPT, tmp_path / "undisturbed", "--no-standby")
    undisturbed.begin(0, 1, 2, 3)
    expected = undisturbed.printed("weights")
    job = gated.begin(0)

    first = gated.at(1)
    kill(first[1])
    second = gated.at(1, other_than=first)
    os.kill(second[1], signal.SIGSTOP)
    gated.open(1)
    third = gated.at(2)
    for process in third.values():
        kill(process)
    gated.at(2, other_than=third)
    gated.open(2, 3)

    assert gated.printed("weights") == expected
    log = job.log.read_text()
    assert re.findall(r"begins 0 2 (\d)", log) == ["0", "1", "1", "2"]
    assert log.count("all ranks start again together") == 3
    assert "HorovodInternalError\n" not in log and "Traceback" not in log


@LONG
def test_with_mpi_the_job_starts_again_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    options = ("--no-standby", "--mpi", "--mpi-args=--oversubscribe")
    undisturbed = GatedRun(SCRIPT, tmp_path / "undisturbed", *options)
    undisturbed.begin(0, 1, 2, 3, **ROOT_MAY_USE_MPI)
    expected = undisturbed.printed("weights")
    run = GatedRun(SCRIPT, tmp_path / "run", *options)
    job = run.begin(0, **ROOT_MAY_USE_MPI)
    try:
        kill(run.at(1)[1])
        run.open(1, 2, 3)
        assert run.printed("weights") == expected
    finally:
        run.kill()
    log = job.log.read_text()
    assert re.findall(r"begins 0 2 (\d)", log) == ["0", "1"]
    assert log.count("starting the job again in 1 s") == 1


def test_an_error_at_the_start_ends_the_job_at_once_and_is_shown_last(gated: GatedRun) -> None:
    job = gated.begin(ERROR="start")
    assert job.wait(PATIENCE) == 1
    log = job.log.read_text()
    assert log.count("ValueError: wrong from the start") == 1
    assert log.rstrip().endswith("ValueError: wrong from the start")
    assert "an exception before the job's first commit:" in log and "start again" not in log


@LONG
def test_the_same_error_twice_in_a_row_ends_the_job(gated: GatedRun, tmp_path: Path) -> None:
    job = gated.begin(0, ERROR="gate")
    kill(gated.at(1)[0])  # the error is not one of the first start then
    gated.open(1)
    assert job.wait(PATIENCE) == 1
    log = job.log.read_text()
    assert log.count("all ranks start again together") == 2
    assert "failed in the same way at the same place again" in log
    assert log.rstrip().endswith("ValueError: wrong at the gate")


def test_the_script_gets_sigterm_and_the_job_can_be_started_again(gated: GatedRun, tmp_path: Path) -> None:
    job = gated.begin(0)
    gated.at(1)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(PATIENCE) == PREEMPTED, job.tail()
    assert [(tmp_path / f"terminated-{rank}").exists() for rank in (0, 1)] == [True, True]
    assert (tmp_path / "checkpoint.pt").exists()
