"""Slurm's ``scontrol`` is stood in for by a script that prints what the real one has printed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hvdrecover.launch import slurm
from hvdrecover.launch.slurm import SlurmJob
from tests.fakes.clock import FakeClock

NOW = 1_795_595_000.0
RUNS = "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0"
SCONTROL = """#!/bin/sh
echo "$*" >> "$ASKED"
case "$SLURM_TIME_FORMAT $*" in
    "%s show job --oneliner "*) exec cat "$SHOWN";;
    "%s requeue "*) exit "$REFUSES";;
esac
exit 1
"""


class StoppedClock(FakeClock):
    """It is always the same time, and what is waited for is there at once."""

    def wait(self, event: threading.Event, timeout: float) -> bool:
        return True


def line(job: int = 7, end: str = "Unknown", preempted: str = "None", states: str = RUNS) -> str:
    times = f"StartTime=1795594000 EndTime={end} PreemptEligibleTime=1795594000 PreemptTime={preempted}"
    nodes = "ReqNodeList=(null) ExcNodeList=(null) NodeList=node[2-4] BatchHost=node2 NumNodes=3"
    return f"JobId={job} JobName=train UserId=u(1) {states} {times} {nodes}\n"


HEADLESS = line().replace("NodeList=node[2-4]", "NodeList=node[3-4]")


class Asked:
    """A job, with what was asked of Slurm."""

    def __init__(self, folder: Path, shown: str, **variables: str) -> None:
        (folder / "scontrol").write_text(SCONTROL)
        (folder / "scontrol").chmod(0o755)
        self._asked, self.shown = folder / "asked", folder / "shown"
        self.shown.write_text(shown)
        environ = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "ASKED": str(self._asked),
            "SHOWN": str(self.shown),
            "REFUSES": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_TASK_PID": str(os.getpid()),
            **variables,
        }
        found = slurm.of_environment(environ, StoppedClock(NOW))
        assert found is not None
        self.job: SlurmJob = found

    def requeued(self) -> list[str]:
        """The names by which a requeue was asked for."""
        lines = self._asked.read_text().splitlines()
        return [line.removeprefix("requeue ") for line in lines if line.startswith("requeue ")]


@pytest.mark.parametrize(
    ("shown", "how"),
    [
        (line(end=str(int(NOW) + 60)), "Slurm ends it at its time limit in 60 s"),
        (line(end=str(int(NOW) + 61)), ""),
        (line(end=str(int(NOW) + 20), preempted=str(int(NOW) - 5)), "Slurm preempts it in 20 s"),
        (line(end="1795595001", states=RUNS.replace("RUNNING", "COMPLETING")), ""),
        (line(), ""),
        ("", ""),
    ],
)
def test_a_job_ends_within_a_minute(tmp_path: Path, shown: str, how: str) -> None:
    job = Asked(tmp_path, shown).job
    job.watch()
    job._thread.join(60)
    assert job.ends_within(60) == how


@pytest.mark.parametrize(
    ("states", "variables", "requeued"),
    [
        (RUNS, {}, ["7"]),
        (RUNS, {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"}, ["7_0"]),
        (RUNS.replace("RUNNING", "COMPLETING"), {}, []),  # Slurm ends or requeues it by itself
        (RUNS.replace("Requeue=1", "Requeue=0"), {}, []),  # it may not start again
        (RUNS.replace("BatchFlag=1", "BatchFlag=0"), {}, []),
    ],
)
def test_a_job_that_has_left_is_requeued_if_it_may(
    tmp_path: Path, states: str, variables: dict[str, str], requeued: list[str]
) -> None:
    asked = Asked(tmp_path, line(states=states), **variables)
    asked.job.requeue(committed=True)
    assert asked.requeued() == requeued


@pytest.mark.parametrize(
    ("end", "preempted", "requeued"),
    [("1795595060", "None", []), ("1795595060", "1795594990", ["7"]), ("1795699999", "None", ["7"])],
)
def test_a_time_limit_too_short_for_a_commit_does_not_continue_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, end: str, preempted: str, requeued: list[str]
) -> None:
    asked = Asked(tmp_path, line(end=end, preempted=preempted))
    asked.job.requeue(committed=False)
    assert asked.requeued() == requeued
    assert ("raise --time" in caplog.text) is not bool(requeued)


def test_an_heir_waits_until_slurm_has_found_that_the_node_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(tmp_path, line())
    looks: list[float] = []

    def wait(event: threading.Event, timeout: float) -> bool:
        looks.append(timeout)
        if len(looks) == 3:
            asked.shown.write_text(HEADLESS)
        return False

    monkeypatch.setattr(asked.job._clock, "wait", wait)
    asked.job.outlive_script()
    assert (len(looks), asked.requeued()) == (3, ["7"])
