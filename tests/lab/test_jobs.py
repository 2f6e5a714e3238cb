"""Jobs over three hosts: one leaves, one is cut off, one loses its power, and launchers are lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, Start
from tests.support.commands import wait_until
from tests.support.faulty_run import assert_no_step_is_lost, assert_private
from tests.support.jobs import DRIVER, GUARDIAN, PATIENCE, PREEMPTED, SUPERVISOR, kill, running
from tests.support.lab import JobInLab, Lab

pytestmark = pytest.mark.acceptance


@pytest.fixture
def job(request: pytest.FixtureRequest, lab: Lab, start: Start, tmp_path: Path) -> Iterator[JobInLab]:
    framework, alone = request.param
    made = JobInLab(lab, tmp_path, framework, start, alone=alone)
    made.wait_for(1 if alone else 3)
    yield made


def lose(job: JobInLab, fault: Callable[[], None]) -> float:
    """Lose a host; how long until the others step again, in seconds."""
    after = job.generation()
    fault()
    struck = time.time()
    return job.wait_for(2, after).time - struck


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(("torch", True), id="torch"),
        pytest.param(("tensorflow", True), id="tensorflow", marks=LONG),
    ],
    indirect=True,
)
def test_hosts_come_and_go_in_every_way(job: JobInLab) -> None:
    lab, (_, second, third) = job.lab, job.lab.hosts
    job.list(*lab.hosts)
    job.wait_for(3, job.generation())

    # One host's preemption: it leaves at a commit, and no step is lost.
    after, leaving = job.generation(), set(job.job.processes()) & set(third.processes())
    os.kill(job.guardian_on(third), signal.SIGTERM)
    after = job.wait_for(2, after).generation
    assert_no_step_is_lost(job.run)
    wait_until(lambda: not leaving & set(third.processes()))  # others come if it is soon taken again
    job.list(*lab.hosts[:2])
    job.list(*lab.hosts)
    job.wait_for(3, after)

    # Cut off, and joined again; it stays listed, and discovery leaves it out until its ssh server answers.
    print(f"cut off: the others step again after {lose(job, third.cut_off):.1f} s")
    wait_until(lambda: not set(running(job.job, *GUARDIAN)) & set(third.processes()))  # by themselves
    wait_until(lambda: job.explained()[third.address] == "unhealthy")
    after = job.generation()
    third.join()
    job.wait_for(3, after)
    wait_until(lambda: job.explained()[third.address] == "used")

    # Without power, and switched on again.
    print(f"powered off: the others step again after {lose(job, second.power_off):.1f} s")
    wait_until(lambda: job.explained()[second.address] == "unhealthy")
    after = job.generation()
    second.power_on()
    job.wait_for(3, after)

    job.assert_each_sample_once()


@pytest.mark.parametrize("job", [("torch", False)], indirect=True, ids=["torch"])
def test_launchers_are_lost_and_nothing_is_left_on_any_host(job: JobInLab) -> None:
    # Horovod's: the supervisor starts the job again.
    after, workers = job.generation(), set(running(job.job, *GUARDIAN))
    assert len(workers) == 3
    assert_private(job.job, size=3)  # also of the two that were started by ssh
    kill(running(job.job, *DRIVER)[0])
    wait_until(lambda: not workers & set(job.job.processes()))
    job.wait_for(3, after)

    # The supervisor: somebody else has to start the job again.
    after = job.generation()
    kill(running(job.job, *SUPERVISOR)[0])
    wait_until(lambda: job.job.processes() == [])
    job.begin()
    job.wait_for(3, after)

    # The whole job's preemption.
    job.run.wait_for(job.job, lambda batch: batch.epoch >= 2)
    os.kill(running(job.job, *SUPERVISOR)[0], signal.SIGTERM)
    assert job.job.wait(PATIENCE) == PREEMPTED
    wait_until(lambda: [len(host.processes()) for host in job.lab.hosts] == [1, 1, 1])  # their ssh servers
    job.assert_each_sample_once()
