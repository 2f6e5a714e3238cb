"""A script for ``horovod.torch.elastic`` runs unchanged but for its import."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, PREEMPTED, Job, elastic, kill, static, supervised, wait_until

SCRIPT = Path(__file__).with_name("scripts") / "horovod_elastic.py"

UNCHANGED = {"ELASTIC": "horovod.torch.elastic", "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.acceptance


def report(job: Job) -> dict[str, object]:
    assert job.wait(PATIENCE) == 0, job.tail()
    return json.loads(re.findall(r"report (\{.*\})", job.log.read_text())[0])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, light: None) -> dict[str, object]:
    log = tmp_path_factory.mktemp("undisturbed") / "log"
    job = Job([*static(2), sys.executable, str(SCRIPT)], log, {**UNCHANGED, "ELASTIC": "hvdrecover.torch"})
    try:
        return report(job)
    finally:
        job.kill()


def test_undisturbed_it_does_what_horovods_does(
    jobs: list[Job], undisturbed: dict[str, object], tmp_path: Path
) -> None:
    jobs.append(Job([*static(2), sys.executable, str(SCRIPT)], tmp_path / "log", UNCHANGED))
    expected = {"result": "trained", "seen": 3 * 240, "resets": [], "rate": pytest.approx(2), "epoch": 2}
    for found in (report(jobs[0]), undisturbed):
        assert {name: value for name, value in found.items() if name != "weights"} == expected


def test_without_a_checkpoint_root_it_survives_rank_0_and_writes_nothing(
    jobs: list[Job], hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cwd"
    folder.mkdir()
    launcher = elastic(hosts)
    monkeypatch.chdir(folder)
    environ = {"ELASTIC": "hvdrecover.torch", "CONTINUE": str(tmp_path / "continue")}
    job = Job([*launcher, sys.executable, str(SCRIPT)], tmp_path / "log", environ)
    jobs.append(job)
    kill(process_after_a_commit_in_epoch_1(job))
    (tmp_path / "continue").touch()
    found = report(job)
    del found["weights"]
    assert found == {
        "result": "trained",
        "seen": 3 * 240,
        "resets": [1],
        "rate": pytest.approx(1),
        "epoch": 2,
    }
    assert list(folder.iterdir()) == []


def test_under_hvdrecover_run_it_survives_with_no_line_changed(
    jobs: list[Job], tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    """A standby replaces rank 0: the size stays, so that no reset of the script's is needed but Horovod's."""
    environ = {**UNCHANGED, "CONTINUE": str(tmp_path / "continue")}
    job = Job([*supervised(), sys.executable, str(SCRIPT)], tmp_path / "log", environ)
    jobs.append(job)
    kill(process_after_a_commit_in_epoch_1(job))
    (tmp_path / "continue").touch()
    assert {**report(job), "resets": []} == undisturbed
    assert "horovod.torch is hvdrecover's in this job" in job.log.read_text()


@pytest.mark.parametrize("fault", ["all are killed", "one hangs", "preemption"])
def test_with_a_checkpoint_root_it_survives_more(
    fault: str, jobs: list[Job], tmp_path: Path, undisturbed: dict[str, object]
) -> None:
    root = str(tmp_path / "root")
    options = supervised("--no-standby", "--checkpoint", root, "--hang-timeout", "20")
    environ = {**UNCHANGED, "CONTINUE": str(tmp_path / "continue")}
    command = [*options, "env", "LANG=C", sys.executable, str(SCRIPT)]  # not Python at first
    job = Job(command, tmp_path / "log", environ)
    jobs.append(job)
    processes = [process_after_a_commit_in_epoch_1(job, rank) for rank in (0, 1)]
    if fault == "all are killed":
        for process in processes:
            kill(process)
    elif fault == "one hangs":
        os.kill(processes[1], signal.SIGSTOP)
    else:
        os.kill(job.pid, signal.SIGTERM)
    (tmp_path / "continue").touch()
    if fault == "preemption":
        assert job.wait(PATIENCE) == PREEMPTED, job.tail()
        job = Job(command, tmp_path / "again", environ)
        jobs.append(job)
    assert {**report(job), "resets": []} == undisturbed


def process_after_a_commit_in_epoch_1(job: Job, rank: int = 0) -> int:

    # It holds after 9 batches of 8 samples. Before the first commit of an epoch, this script would repeat
    # the epoch before: its last commit there has the old number of the epoch.
    def look() -> list[str]:
        return re.findall(rf"progress (\d+) {rank} 1 {240 + 9 * 8}\b", job.log.read_text())

    return int(wait_until(job, look)[0])
