"""The job of ``examples/slurm/train.sbatch`` in a real Slurm, through all that may happen to it there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.conftest import LONG
from tests.lab import slurm
from tests.lab.slurm import Slurm
from tests.support.commands import wait_until
from tests.support.faulty_run import assert_no_step_is_lost
from tests.support.jobs import PATIENCE, Batch, DigitsRun, command, durable, kill
from tests.support.lab import SLOW_HOSTS, Lab

EXAMPLE = Path(__file__).parents[2] / "examples" / "slurm" / "train.sbatch"
SRUN = {"HVDRECOVER_REMOTE_SHELL": os.fspath(EXAMPLE.with_name("srun-shell"))}
# Tasks of an array share its options, so the ledger of each is found by its environment.
TRAIN = """
import os, sys
from hvdrecover.examples.torch_digits import main
main([*sys.argv[1:], "--ledger", "ledger" + os.environ.get("SLURM_ARRAY_TASK_ID", "")])
"""
EPOCHS = 200  # more than most tests wait for
LEFT = "75:0"  # an exit code, as Slurm shows it
SILENT = "--signal=B:CONT@1"  # instead of the example's: nothing is told of the end

pytestmark = pytest.mark.acceptance


@pytest.fixture
def cluster(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Slurm]:
    """A cluster; the parameter, if there is one, is more of its ``slurm.conf``."""
    if why := slurm.lacks():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)
    made = Slurm(lab, getattr(request, "param", ""))
    yield made
    made.close()


class SlurmRun(DigitsRun):
    """A digits job, submitted as the example says."""

    def __init__(
        self, folder: Path, cluster: Slurm, *options: str, epochs: int = EPOCHS, **more: str
    ) -> None:
        super().__init__(folder, epochs)
        self.root = folder / "checkpoints" / "train"  # which the example chooses
        (folder / "train.py").write_text(TRAIN)
        environ = {
            **SLOW_HOSTS,
            "HVDRECOVER_EVENTS": os.fspath(folder / "events"),
            "HVDRECOVER_NEAR": "off",  # the hosts of a lab have one memory
            "XDG_CACHE_HOME": os.fspath(folder / "cache"),  # each cluster's first job is job 1
            "PATH": os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]]),
            **more,
        }
        words = [
            "--parsable",
            f"--chdir={folder}",
            f"--output={folder}/log.txt",
            "--ntasks-per-node=1",
            *options,
        ]
        train = ["--epochs", str(epochs), "--step-seconds", "0.04"]
        self._cluster = cluster
        self._running, self._ask_again = True, 0.0
        self.id = cluster.run("sbatch", *words, os.fspath(EXAMPLE), *train, environ=environ).strip()

    def shown(self) -> dict[str, str]:
        return self._cluster.job(self.id)

    def until(self, **wanted: str) -> dict[str, str]:
        self.wait(lambda: wanted.items() <= self.shown().items())
        return self.shown()

    def wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            assert time.monotonic() < deadline, f"{self.shown()}\n{self.tail()}"
            time.sleep(0.2)

    def tail(self) -> str:
        return f"{self.log[-4000:]}\n{self._cluster.log()}" if (self.folder / "log.txt").exists() else ""

    @property
    def running(self) -> bool:
        """Return whether it runs or will run, as for a `Job`; asked now and then."""
        if time.monotonic() > self._ask_again:
            self._ask_again = time.monotonic() + 2.0
            self._running = self.shown()["JobState"] in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        return self._running

    def trains(self, size: int, after: int = 0) -> Batch:
        """Wait until so many ranks train, after a generation."""
        return self.wait_for(self, lambda batch: batch.size == size and batch.generation > after)  # type: ignore[arg-type]

    def generation(self) -> int:
        return self.batches()[-1].generation


def assert_hosts_are_empty(lab: Lab, cluster: Slurm) -> None:
    wait_until(lambda: {p for host in lab.hosts for p in host.processes()} == set(cluster.daemons()))


def test_a_preempted_job_is_requeued_and_resumes_and_a_cancelled_one_is_not(
    lab: Lab, cluster: Slurm, tmp_path: Path
) -> None:
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=3")
    run.trains(3)
    after = run.generation()
    # Of more priority: the job has a minute of grace, of which Slurm says nothing to it.
    cluster.run(
        "sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    run.trains(3, after)
    assert run.until(JobState="RUNNING")["Restarts"] == "1"
    assert "Slurm preempts it in" in run.log
    assert_no_step_is_lost(run)

    cluster.run("scancel", run.id)  # by SIGTERM to all of its processes on the first node
    shown = run.until(JobState="CANCELLED")
    assert (shown["Restarts"], shown["ExitCode"]) == ("1", LEFT)
    assert_no_step_is_lost(run)
    assert_hosts_are_empty(lab, cluster)


@LONG
def test_nodes_without_ssh_start_processes_by_srun(lab: Lab, cluster: Slurm, tmp_path: Path) -> None:
    cluster.forbid_ssh()
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=3", **SRUN)
    run.trains(3)
    run.wait(lambda: durable(run.root) >= 3)
    after = run.generation()
    (trains,) = [each for each in lab.hosts[2].processes() if "train.py" in command(each)[1:2]]
    kill(trains)
    run.trains(3, after)
    run.wait(lambda: durable(run.root) >= 6)

    after = run.generation()
    cluster.run("scontrol", "requeue", run.id)
    run.trains(3, after)
    assert run.until(JobState="RUNNING")["Restarts"] == "1"
    cluster.run("scancel", run.id)
    run.until(JobState="CANCELLED")
    assert_hosts_are_empty(lab, cluster)


@LONG
@pytest.mark.parametrize("cluster", ["SlurmctldParameters=preempt_send_user_signal\n"], indirect=True)
def test_a_cluster_may_send_the_signal_of_a_preemption(cluster: Slurm, tmp_path: Path) -> None:
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=3")
    run.trains(3)
    after = run.generation()
    cluster.run(
        "sbatch", "--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    run.trains(3, after)
    assert "hvdrecover: SIGTERM: the job leaves" in run.log
    assert_no_step_is_lost(run)


@LONG
def test_a_job_leaves_before_its_time_limit_and_is_requeued(cluster: Slurm, tmp_path: Path) -> None:
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=2", "--time=4", SILENT)
    run.trains(2)
    after = run.generation()
    run.trains(2, after)
    assert run.until(JobState="RUNNING")["Restarts"] == "1"
    assert "Slurm ends it at its time limit in" in run.log
    assert_no_step_is_lost(run)


@LONG
def test_nodes_are_lost_and_others_take_their_place_at_a_requeue(
    lab: Lab, cluster: Slurm, tmp_path: Path
) -> None:
    first, second, third = lab.hosts
    cluster.set_node(third, "DRAIN")
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=2")
    run.trains(2)
    after = run.generation()

    # One that is down is no longer the job's, which continues without it.
    cluster.set_node(second, "DOWN")
    run.trains(1, after)
    shown = run.shown()
    assert (shown["JobState"], shown["Restarts"], shown["NodeList"]) == ("RUNNING", "0", first.name)
    assert_no_step_is_lost(run)
    wait_until(lambda: set(second.processes()) <= set(cluster.daemons()))

    # An administrator's requeue tells all processes on the first node at once.
    cluster.set_node(third, "RESUME")
    after = run.generation()
    cluster.run("scontrol", "requeue", run.id)
    run.trains(2, after)
    shown = run.until(JobState="RUNNING")
    assert shown["Restarts"] == "1"
    assert shown["NodeList"] == f"{first.name.removesuffix('1')}[1,3]"
    assert_no_step_is_lost(run)


@LONG
def test_a_job_whose_first_node_loses_its_power_is_requeued_by_slurm(
    lab: Lab, cluster: Slurm, tmp_path: Path
) -> None:
    first, second, _ = lab.hosts
    cluster.set_node(first, "DRAIN")
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=2")
    run.wait(lambda: durable(run.root) >= 3)
    assert run.shown()["BatchHost"] == second.name
    after = run.generation()
    second.power_off()
    cluster.set_node(first, "RESUME")
    run.trains(2, after)
    shown = run.until(JobState="RUNNING")
    assert shown["Restarts"] == "1"
    assert shown["NodeList"] == f"{first.name.removesuffix('1')}[1,3]"
    resumed = run.generation()
    wait_until(lambda: resumed in run.generations())  # events take longer than lines of the ledger
    assert run.generations()[resumed] >= 3


@LONG
def test_one_task_of_an_array_is_requeued_and_the_other_continues(cluster: Slurm, tmp_path: Path) -> None:
    run = SlurmRun(tmp_path / "run", cluster, "--nodes=1", "--array=0-1", epochs=15)
    folder = run.folder / "checkpoints"

    def generations(task: int) -> set[str]:
        return {path.parent.name.partition("-")[0] for path in folder.glob(f"train-{task}/*/MANIFEST.json")}

    run.wait(lambda: bool(generations(0)) and bool(generations(1)))
    task = next(
        task for task in (0, 1) if cluster.job(f"{run.id}_{task}")["JobId"] == run.id
    )  # the array's own id
    cluster.run("scancel", "--batch", "--signal=TERM", f"{run.id}_{task}")
    run.wait(lambda: "g0002" in generations(task))
    for each, restarts in ((task, "1"), (1 - task, "0")):
        run.wait(lambda each=each: cluster.job(f"{run.id}_{each}")["JobState"] == "COMPLETED")
        assert cluster.job(f"{run.id}_{each}")["Restarts"] == restarts
    assert "g0002" not in generations(1 - task)
