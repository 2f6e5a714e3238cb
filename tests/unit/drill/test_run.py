from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.drill.run import Run, wait_until
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch.job import Job
from tests.support.jobs import running


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[Job]:
    """A job that waits until it is killed."""
    job = Run(tmp_path).launch([sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1"])
    yield job
    job.kill()


def test_a_wait_returns_what_was_found_and_processes_are_known_by_their_module(waiting: Job) -> None:
    assert wait_until(waiting, lambda: running(waiting, "http.server")) == [waiting.pid]
    assert running(waiting, "http.server", "0") == [waiting.pid]
    assert running(waiting, "http") == running(waiting, "http.server", "1") == []


def test_a_wait_for_a_job_that_ends_fails_with_the_end_of_its_log(tmp_path: Path) -> None:
    job = Run(tmp_path).launch([sys.executable, "-c", "print('no data')"])
    with pytest.raises(HvdrecoverError, match=r"(?s)has ended.*\nno data"):
        wait_until(job, lambda: False)
