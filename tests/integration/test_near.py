"""The near tier under real kills: what all processes of a job lose, their host's memory still has."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.jobs import (
    PATIENCE,
    SHARED_MEMORY,
    Commit,
    Job,
    command,
    commits,
    durable,
    near_folder,
    near_root,
    supervised,
    wait_until,
)

SCRIPT = Path(__file__).with_name("scripts") / "few_steps.py"
RESUMED = re.compile(
    r"resumed from commit (\d+) in the memory of \S+, (\d+) commits? newer than the durable one"
)
EVERY = 15  # steps between durable commits
STEPS = 300
USER = 12345  # another one than who runs the tests

pytestmark = pytest.mark.acceptance


class NearRun:
    """A job of ``scripts/few_steps.py`` in a folder of its own, through any number of starts."""

    def __init__(self, folder: Path, near: str = "auto") -> None:
        folder.mkdir()
        self.folder = folder
        self.root = folder / "root"
        self.setting = near
        self.near_folder = near_folder(SHARED_MEMORY if near in ("auto", "off") else Path(near))
        self.jobs: list[Job] = []

    @property
    def near(self) -> Path | None:
        """Its near root, if there is one."""
        return near_root(self.root, self.near_folder)

    def start(
        self, steps: int = STEPS, seconds: float = 0.05, near: str | None = None, workers: int = 2
    ) -> Job:
        launcher = supervised("--no-standby", workers=workers)
        command = ["env", "-C", str(self.folder), *launcher, sys.executable, str(SCRIPT)]
        environ = {
            "HVDRECOVER_NEAR": near or self.setting,
            "ROOT": self.root.name,
            "OUTPUTS": str(self.folder),
        }
        environ |= {"STEPS": str(steps), "SECONDS": str(seconds), "EVERY": str(EVERY)}
        self.jobs.append(Job(command, self.folder / "log.txt", environ))
        return self.jobs[-1]

    def log(self) -> str:
        return (self.folder / "log.txt").read_text(errors="replace")

    def finish(self, job: Job) -> None:
        assert job.wait(PATIENCE) == 0, job.tail()

    def wait_for(self, job: Job, commit: int) -> None:
        """Wait until a commit of this number, or a later one, is sealed."""
        wait_until(job, lambda: any(each.number >= commit for each in self.sealed()), "sealed commit")

    def sealed(self) -> list[Commit]:
        near = self.near
        return [] if near is None else commits(near)

    def stop_between_durable_commits(self, job: Job) -> None:
        """Stop what trains where two commits are sealed that are newer than the durable one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            for process in self.trainings(job):
                os.kill(process, signal.SIGSTOP)
            newest = durable(self.root)
            if newest > 0 and len([each for each in self.sealed() if each.number > newest]) >= 2:
                return
            assert time.monotonic() < deadline, job.tail()
            for process in self.trainings(job):
                os.kill(process, signal.SIGCONT)
            time.sleep(0.03)

    def trainings(self, job: Job) -> list[int]:
        """The processes of a job that train."""
        return [each for each in job.processes() if command(each)[1:2] == [os.fspath(SCRIPT)]]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[NearRun]]:
    runs: list[NearRun] = []
    yield runs
    for run in runs:
        for job in run.jobs:
            job.kill()
        for folder in run.near_folder.parent.glob("hvdrecover-*"):  # of any user
            if near := near_root(run.root, folder):
                shutil.rmtree(near)
                with suppress(OSError):  # others are there
                    folder.rmdir()


def a_run(runs: list[NearRun], folder: Path, near: str = "auto") -> NearRun:
    runs.append(NearRun(folder, near))
    return runs[-1]


def test_whatever_is_killed_the_job_resumes_from_memory_and_ends_bitwise_equal(
    runs: list[NearRun], tmp_path: Path
) -> None:
    clean = a_run(runs, tmp_path / "clean", "off")
    beside = clean.start(seconds=0.0)
    run = a_run(runs, tmp_path / "run")
    job = run.start()
    run.wait_for(job, 20)
    run.stop_between_durable_commits(job)
    killed = run.sealed()[-1].number
    for process in run.trainings(job):  # the guardians live, and restart them in place
        os.kill(process, 9)
    run.wait_for(job, killed + 2 * EVERY)
    run.stop_between_durable_commits(job)
    job.kill()  # and now the supervisor, horovodrun, guardians and all
    older, newest = run.sealed()[-2:]
    run.root.rename(tmp_path / "unmounted")
    assert run.start().wait(PATIENCE) == 1
    assert "EmptiedRootError" in run.log() and str(run.near) in run.log()
    assert run.sealed()[-2:] == [older, newest] and not run.root.exists()
    (tmp_path / "unmounted").rename(run.root)
    assert run.near is not None
    damaged = run.near / newest.name / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-3] ^= 1
    damaged.write_bytes(content)
    run.finish(run.start(seconds=0.0))
    (first, lead), (second, _) = [(int(commit), int(lead)) for commit, lead in RESUMED.findall(run.log())]
    assert 20 <= first <= killed and second == older.number
    assert lead > 0  # a durable commit that is being written is none yet
    assert run.log().count(f"passing over {newest.name}") == 1
    assert run.near is None
    clean.finish(beside)
    assert re.findall("weights .*", run.log()) == re.findall("weights .*", clean.log())


def test_of_two_jobs_on_a_host_one_is_replaced_and_does_not_come_back_through_its_near_root(
    runs: list[NearRun], tmp_path: Path
) -> None:
    one, other = (a_run(runs, tmp_path / name) for name in ("one", "other"))
    job, second = one.start(), other.start(steps=60, workers=1)
    one.wait_for(job, EVERY + 5)
    job.kill()
    other.finish(second)
    left, before = one.sealed(), durable(one.root)
    assert left and other.near is None
    replacing = one.start(near="off", workers=1)  # as one on other hosts, with a memory of their own
    claim = one.root / "claims" / "g0002.json"  # acknowledged after its first durable commit
    wait_until(
        replacing, lambda: durable(one.root) > before and b'"acknowledged": true' in claim.read_bytes()
    )
    replacing.kill()
    assert one.sealed() == left
    newest = durable(one.root)
    one.finish(one.start(steps=newest + 5, seconds=0.0, workers=1))
    assert f"passing over {left[-1].name}: another job has taken the checkpoint root since" in one.log()
    assert RESUMED.findall(one.log()) == []
    assert one.near is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a folder to another user")
def test_a_folder_that_another_user_has_made_first_is_not_trusted(
    runs: list[NearRun], tmp_path: Path
) -> None:
    run = a_run(runs, tmp_path / "run", str(tmp_path / "near"))
    run.near_folder.mkdir(parents=True)
    os.chown(run.near_folder, USER, USER)
    run.finish(run.start(steps=5, workers=1))
    assert re.search(f"near tier: off.*{run.near_folder}: ", run.log())
    assert list(run.near_folder.iterdir()) == []


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to mount a file system")
def test_without_room_for_it_the_tier_is_off_and_says_why(runs: list[NearRun], tmp_path: Path) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
    try:
        run = a_run(runs, tmp_path / "run", str(folder))
        run.finish(run.start(steps=8, workers=1))
        assert re.search(r"near tier: off on \S+: 3 commits of .* do not fit", run.log()), run.log()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
