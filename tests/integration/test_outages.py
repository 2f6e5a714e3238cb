"""Real jobs whose storage fails, hangs and comes back."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.support import commands
from tests.support.jobs import PATIENCE, Job, static, supervised, wait_until

SCRIPT = Path(__file__).with_name("scripts") / "moody_storage.py"
Launch = Callable[..., Job]

pytestmark = pytest.mark.acceptance


@pytest.fixture
def mood(tmp_path: Path) -> Path:
    mood = tmp_path / "mood"
    mood.write_text("works")
    return mood


@pytest.fixture
def launch(jobs: list[Job], tmp_path: Path, mood: Path) -> Launch:
    def start(launcher: list[str], **environ: str) -> Job:
        variables = {
            "MOOD": str(mood),
            "EXIT": str(tmp_path / "exit"),
            "HVDRECOVER_CHECKPOINT": f"moody://{tmp_path / 'root'}",
            **environ,
        }
        jobs.append(Job([*launcher, sys.executable, str(SCRIPT)], tmp_path / "log", variables))
        return jobs[-1]

    return start


def wait_for(job: Job, what: str, after: int = 0) -> int:
    """Wait until the log says it; return where that ends."""
    pattern = re.compile(what)
    return wait_until(job, lambda: pattern.search(job.log.read_text(), after), what).end()


def test_training_continues_through_an_outage_and_says_so_twice(
    launch: Launch, mood: Path, tmp_path: Path
) -> None:
    job = launch(static(2))
    here = wait_for(job, r"rank 0 durable g0001-c")
    mood.write_text("fails")
    here = wait_for(
        job, r"could not be written: .*on fire.*Training continues.*last durable commit, \d+, is \d+ s", here
    )
    for _ in range(10):
        here = wait_for(job, r"step \d+ rank 0", here)
    mood.write_text("works")
    wait_for(job, r"the storage works again after \d+ s; g\d+-c\d+ is durable", here)
    (tmp_path / "exit").touch()
    assert job.wait(PATIENCE) == 0, job.tail()
    log = job.log.read_text()
    for said in ("could not be written", "works again after", "on fire"):
        assert log.count(said) == 1


@pytest.mark.parametrize(
    ("kind", "trouble"),
    [
        ("static", "hangs"),
        ("supervised", "fails"),
        pytest.param("static", "fails", marks=LONG),
        pytest.param("supervised", "hangs", marks=LONG),
    ],
)
def test_a_job_that_can_make_nothing_durable_for_too_long_ends_on_all_ranks(
    launch: Launch, mood: Path, tmp_path: Path, kind: str, trouble: str
) -> None:
    launcher = static(2) if kind == "static" else supervised("--no-standby")
    job = launch(launcher, HVDRECOVER_MAX_DURABLE_AGE="30", HVDRECOVER_EVENTS=str(tmp_path / "events"))
    here = wait_for(job, r"rank 0 durable g0001-c")
    mood.write_text(trouble)
    assert job.wait(PATIENCE) != 0
    log = job.log.read_text()[here:]
    assert re.search(r"DurableAgeError: .* \d+ s.*HVDRECOVER_MAX_DURABLE_AGE", log)
    assert "resuming from commit" not in log and "restarted" not in log and "resumed" not in log
    if kind == "supervised":
        assert re.search(r"`HVDRECOVER_MAX_DURABLE_AGE`:$", log, re.MULTILINE)
    commands.wait_until(lambda: job.processes() == [])  # the launcher's exit is not awaited by its workers
