"""Jobs over three hosts: one leaves, one is cut off, one loses its power, and launchers are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LONG, TENSORFLOW_IF_LONG, Start
from tests.integration.faults import FaultyRun, assert_no_step_is_lost, wait_until_all_train
from tests.integration.test_guardians import SECRET, assert_private
from tests.lab.conftest import SLOW_HOSTS
from tests.support.jobs import (
    DRIVER,
    GUARDIAN,
    PATIENCE,
    PREEMPTED,
    SUPERVISOR,
    TRAINING_SAMPLES,
    Batch,
    Commit,
    Job,
    commits,
    kill,
    near_folder,
    near_root,
    running,
)
from tests.support.lab import INTERFACE, Host, Lab
from tests.waiting import wait_until

EPOCHS = 200  # more than any test waits for

pytestmark = pytest.mark.acceptance


class JobInLab:
    """A digits job under ``hvdrecover run`` on the lab's hosts, one slot each.

    Args:
        lab: the hosts.
        folder: for its files.
        framework: whose example.
        start: starts it.
    """

    def __init__(self, lab: Lab, folder: Path, framework: str, start: Start) -> None:
        self.lab = lab
        self.run = FaultyRun(folder / "run", framework, (), EPOCHS, "--step-seconds", "0.04")
        self._listing = folder / "hosts"
        self._near = folder / "near"
        self._start = start
        self.list(*lab.hosts)
        self.job = self.begin()

    def list(self, *hosts: Host) -> None:
        """Have host discovery name these hosts from now on."""
        fresh = self._listing.with_suffix(".new")
        fresh.write_text("".join(f"{host.address}:1\n" for host in hosts))
        fresh.rename(self._listing)

    def begin(self) -> Job:
        """Start it, or start it again."""
        command = [sys.executable, "-m", "hvdrecover", "run", "-np", "3", "--min-np", "1", "--no-standby"]
        command += ["--discover", f"file {self._listing}", "--network-interface", INTERFACE]
        command += ["-i", os.fspath(self.lab.key), "--blacklist-cooldown-range", "1", "60", "--"]
        environ = {**SLOW_HOSTS, "OMP_NUM_THREADS": "1", "AWS_SECRET_ACCESS_KEY": SECRET, **self.run.faults}
        environ["FAULTS_NEAR"] = os.fspath(self._near)
        self.job = self._start(self.run, self.lab.hosts[0].command(command), environ)
        return self.job

    def wait_for(self, size: int, after: int = 0) -> Batch:
        """Wait until all of a number of ranks train, after a generation."""
        return wait_until_all_train(self.run, self.job, after, size)

    def guardian_on(self, host: Host) -> int:
        """The guardian on a host."""
        (guardian,) = set(running(self.job, *GUARDIAN)) & set(host.processes())
        return guardian

    def sealed_on(self, host: Host) -> Commit | None:
        """The newest near commit of a host, if there is one yet."""
        near = near_root(self.run.root, near_folder(self._near / host.address))
        return max(commits(near), default=None) if near is not None else None

    def generation(self) -> int:
        """The newest generation that trains."""
        return self.run.batches()[-1].generation

    def explained(self) -> dict[str, str]:
        """Return what becomes of each host, as host discovery explains it."""
        command = [sys.executable, "-m", "hvdrecover", "discover", "file", os.fspath(self._listing)]
        command += ["--allow-empty", "--identity", os.fspath(self.lab.key), "--explain"]
        printed = subprocess.check_output(self.lab.hosts[0].command(command), text=True)
        return {line.split()[0]: line.split()[2] for line in printed.splitlines()[1:]}

    def assert_each_sample_once(self) -> None:
        """In all epochs that have ended."""
        self.run.wait_for(self.job, lambda batch: batch.epoch > 0)
        last = max(batch.epoch for batch in self.run.committed())
        assert last > 0
        for epoch in range(last):
            seen = self.run.samples(epoch)
            assert set(seen) == set(range(TRAINING_SAMPLES))
            assert seen.total() - TRAINING_SAMPLES <= 2


@pytest.fixture
def job(request: pytest.FixtureRequest, lab: Lab, start: Start, tmp_path: Path) -> Iterator[JobInLab]:
    made = JobInLab(lab, tmp_path, request.param, start)
    made.wait_for(3)
    yield made


def lose(job: JobInLab, fault: Callable[[], None]) -> float:
    """Lose a host; how long until the others step again, in seconds."""
    after = job.generation()
    fault()
    struck = time.time()
    return job.wait_for(2, after).time - struck


@pytest.mark.parametrize("job", TENSORFLOW_IF_LONG, indirect=True)
def test_hosts_come_and_go_in_every_way(job: JobInLab) -> None:
    lab, (_, second, third) = job.lab, job.lab.hosts

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


@pytest.mark.parametrize("job", ["torch"], indirect=True)
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


@LONG
@pytest.mark.parametrize("job", ["torch"], indirect=True)
def test_the_old_commits_of_a_host_that_was_cut_off_are_not_what_the_job_resumes_from(job: JobInLab) -> None:
    first, _, third = job.lab.hosts
    wait_until(lambda: job.sealed_on(third) is not None)
    lose(job, third.cut_off)
    trained = job.run.batches()[-1]
    job.run.wait_for(job.job, lambda batch: batch.commit >= trained.commit + 4)
    job.job.kill()
    wait_until(lambda: not set(running(job.job, *GUARDIAN)) & set(third.processes()))
    old, new = job.sealed_on(third), job.sealed_on(first)
    assert old is not None and new is not None and old < new
    after = job.generation()
    third.join()
    job.begin()
    job.wait_for(3, after)
    assert job.run.sources()[min(each for each in job.run.sources() if each > after)] == "near"
    resumed = [line for line in job.run.log.splitlines() if "resumed from commit" in line]
    assert f"resumed from commit {new.number} in the memory of" in resumed[-1]
    wait_until(lambda: (job.sealed_on(third) or new) > new)  # and it keeps up with the others
    job.run.wait_for(job.job, lambda batch: batch.epoch >= 2)
    job.assert_each_sample_once()
