"""One checkpoint root, any launcher, any number of workers."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.integration.conftest import Start
from tests.support.commands import wait_until
from tests.support.faulty_run import a_long_run, assert_each_sample_once
from tests.support.jobs import PATIENCE, Job, durable, elastic, mpi, mpirun, static, supervised

pytestmark = pytest.mark.acceptance


def test_each_launcher_continues_from_where_the_one_before_was_killed(
    start: Start, hosts: Path, tmp_path: Path
) -> None:
    run = a_long_run(tmp_path / "run", epochs=4, gates=[6, 12, 18, 24])  # one for each start
    launchers = [
        ("plain", [], 1),  # which needs no launcher and no variables
        ("mpirun", mpirun(2), 2),
        ("static", static(3), 3),
        ("elastic", elastic(hosts), 2),
    ]
    for _, launcher, workers in launchers:
        job = start(run, launcher)
        begun = max((batch.time for batch in run.batches()), default=0.0)
        first = run.wait_for(job, lambda batch, begun=begun: batch.time > begun)
        assert first.size == workers
        run.wait_for(
            job,
            lambda batch, first=first: batch.commit >= first.commit + 3 and durable(run.root) > first.commit,
        )
        job.kill()
        run.open()
    run.finish(start(run, mpi(2)))
    starts = [commit for _, commit in sorted(run.generations().items())]
    assert starts[0] == 0 and starts == sorted(set(starts))
    assert_each_sample_once(run, padding=2)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_a_host_that_does_not_exist_is_named_and_nohup_keeps_a_job_beyond_its_terminal(
    tmp_path: Path,
) -> None:
    words = ["nohup", *supervised("-H", "localhost:1,nowhere.invalid:1"), "python", "-c", "pass"]
    job = Job(words, tmp_path / "log", {"HVDRECOVER_EVENTS": str(tmp_path / "events")})
    try:
        wait_until(lambda: (tmp_path / "events").exists())
        os.kill(job.pid, signal.SIGHUP)  # as a terminal sends when it is closed
        wait_until(lambda: "Could not resolve hostname nowhere.invalid" in job.tail(1000) or not job.running)
        assert job.running, job.tail()
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(PATIENCE) == 130
    finally:
        job.kill()
