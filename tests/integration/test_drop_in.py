"""A script for ``horovod.torch.elastic`` runs unchanged but for its import."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, Job, elastic, kill, static, supervised

SCRIPT = Path(__file__).with_name("scripts") / "horovod_elastic.py"

pytestmark = pytest.mark.acceptance


def report(job: Job) -> dict[str, object]:
    assert job.wait(PATIENCE) == 0, job.tail()
    return json.loads(re.findall(r"report (\{.*\})", job.log.read_text())[0])


@pytest.mark.parametrize("module", ["horovod.torch.elastic", "hvdrecover.torch"])
def test_undisturbed_it_does_what_horovods_does(module: str, jobs: list[Job], tmp_path: Path) -> None:
    environ = {"ELASTIC": module}
    jobs.append(Job([*static(2), sys.executable, str(SCRIPT)], tmp_path / "log", environ))
    expected = {"result": "trained", "seen": 3 * 240, "resets": [], "rate": pytest.approx(2), "epoch": 2}
    assert report(jobs[0]) == expected


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
    kill(process_of_rank_0_after_a_commit_in_epoch_1(job))
    (tmp_path / "continue").touch()
    found = report(job)
    assert found == {
        "result": "trained",
        "seen": 3 * 240,
        "resets": [1],
        "rate": pytest.approx(1),
        "epoch": 2,
    }
    assert list(folder.iterdir()) == []


def test_under_hvdrecover_run_it_survives_with_no_line_changed(jobs: list[Job], tmp_path: Path) -> None:
    """A standby replaces rank 0: the size stays, so that no reset of the script's is needed but Horovod's."""
    environ = {"ELASTIC": "horovod.torch.elastic", "CONTINUE": str(tmp_path / "continue")}
    job = Job([*supervised(), sys.executable, str(SCRIPT)], tmp_path / "log", environ)
    jobs.append(job)
    killed = process_of_rank_0_after_a_commit_in_epoch_1(job)
    kill(killed)
    (tmp_path / "continue").touch()
    found = report(job)
    assert (found["result"], found["seen"], found["epoch"]) == ("trained", 3 * 240, 2)
    assert found["rate"] == pytest.approx(2)
    assert "horovod.torch is hvdrecover's in this job" in job.log.read_text()


def process_of_rank_0_after_a_commit_in_epoch_1(job: Job) -> int:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and job.running:
        # It holds after 9 batches of 8 samples. Before the first commit of an epoch, this script would repeat
        # the epoch before: its last commit there has the old number of the epoch.
        if found := re.findall(rf"progress (\d+) 0 1 {240 + 9 * 8}\b", job.log.read_text()):
            return int(found[0])
        time.sleep(0.05)
    raise AssertionError(job.tail())
