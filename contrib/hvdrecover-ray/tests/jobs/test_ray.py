"""Jobs on a real Ray cluster: lost processes and nodes, and the result or error in the driver."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.config import PREEMPTED
from hvdrecover.drill.run import Job
from hvdrecover.launch.processes import command, kill
from raylets import Raylets, environment, raylets
from tests.integration.conftest import LONG, Start
from tests.support.commands import wait_until
from tests.support.faulty_run import FaultyRun, assert_each_sample_once, wait_until_all_train
from tests.support.jobs import durable, parent, read_events, running

EXAMPLE = Path(__file__).parents[2] / "example.py"
SCRIPT = Path(__file__).with_name("scripts") / "ray_digits.py"
DRILL = SCRIPT.with_name("ray_drill.py")
FAULTS = "kill,kill-all,preempt,script-error"
QUICK = ("--epochs", "2", "--step-seconds", "0.02", "--commit-every", "2")


SEES = """\
import os, ray, hvdrecover_ray
ray.init(log_to_driver=False)
def train():
    return os.environ["CUDA_VISIBLE_DEVICES"], os.environ["WORD"], os.getcwd()
print(*hvdrecover_ray.run(train, 2, gpus=1, options=["--no-standby"]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets() as started:
        yield started


@pytest.fixture
def nodes(cluster: Raylets) -> Iterator[list[Any]]:
    """Two nodes with room for one process each. Nodes that a test adds to the list are removed, too."""
    added = [cluster.add(num_cpus=1), cluster.add(num_cpus=1)]
    yield added
    for node in added:
        cluster.kill(node)


class RayRun(FaultyRun):
    """A run of the digits example by `hvdrecover_ray.run`."""

    def __init__(self, folder: Path, epochs: int = 2) -> None:
        super().__init__(folder / "run", "torch", (), epochs)
        self._program = [os.fspath(SCRIPT)]


def ancestors(process: int) -> Iterator[int]:
    while process := parent(process):
        yield process


def newest(run: RayRun) -> int:
    return max(run.generations())


def host_of(run: RayRun, rank: int) -> str:
    """Return the host of a rank, from its events."""
    process = run.process_of(rank)
    (host,) = {event["host"] for event in read_events(run.folder / "events") if event["pid"] == process}
    return str(host)


def returned(run: RayRun) -> list[int]:
    (numbers,) = re.findall(r"^returned \((\d+), (\d+), (\d+)\)$", run.log, re.MULTILINE)
    return list(map(int, numbers))


def finish(run: RayRun, job: Job, size: int) -> None:
    """Wait for the end. The driver has rank 0's result, and the job used each sample once."""
    run.finish(job)
    assert returned(run) == [0, size, run.process_of(0)]
    assert_each_sample_once(run, padding=2)


@LONG
def test_processes_and_nodes_come_and_go(
    cluster: Raylets, nodes: list[Any], start: Start, tmp_path: Path
) -> None:
    """Takes three quarters of a minute of a core."""
    run = RayRun(tmp_path, epochs=6)
    job = start(run, (), cluster.environ)
    wait_until_all_train(run, job, 0)
    hosts = {host_of(run, rank) for rank in (0, 1)}
    # The nodes share an address, but are two hosts.
    assert hosts == {f"{node.node_ip_address}-{node.node_id[:8]}" for node in nodes}

    after = newest(run)
    kill(run.process_of(1))  # its guardian restarts it in place
    wait_until_all_train(run, job, after)
    assert {host_of(run, rank) for rank in (0, 1)} == hosts

    after, lost = newest(run), next(node for node in nodes if node.node_id[:8] in host_of(run, 1))
    cluster.kill(lost)
    nodes.remove(lost)
    wait_until_all_train(run, job, after, size=1)

    after = newest(run)
    nodes.append(cluster.add(num_cpus=1))
    wait_until_all_train(run, job, after)
    assert nodes[-1].node_id[:8] in "".join(host_of(run, rank) for rank in (0, 1))
    finish(run, job, size=2)


@LONG
def test_actors_and_launchers_are_lost_and_a_node_is_drained(
    cluster: Raylets, nodes: list[Any], start: Start, tmp_path: Path
) -> None:
    """Takes a minute of a core."""
    run = RayRun(tmp_path, epochs=6)
    environ = {**cluster.environ, "OPTIONS": "--blacklist-cooldown-range 1 2"}  # with standbys
    job = start(run, (), environ)
    wait_until_all_train(run, job, 0)

    after, guardian = newest(run), parent(run.process_of(1))
    wait_until(lambda: guardian in {event["pid"] for event in run.events("standby")})  # it is ready
    kill(run.process_of(1))
    wait_until_all_train(run, job, after)
    assert (parent(run.process_of(1)), run.events("restart")[-1]["warm"]) == (guardian, True)

    # An actor and its processes: the slot gets another actor.
    after, lost = newest(run), run.process_of(1)
    actor = next(each for each in ancestors(lost) if "hvdrecover_ray.slot_server" in command(each))
    kill(parent(actor))
    wait_until(lambda: not Path(f"/proc/{lost}").exists())
    first = wait_until_all_train(run, job, after)
    # Generations count from the last one with a durable commit. The ledger refuses to repeat one.
    run.wait_for(job, lambda batch: batch.commit > first.commit and durable(run.root) > first.commit)

    workers = set(running(job, "hvdrecover", "worker"))
    kill(running(job, "hvdrecover.launch.horovodrun")[0])
    wait_until(lambda: not workers & set(job.processes()))
    run.wait_for(job, lambda batch: batch.rank == 1 and batch.size == 2, after=time.time())

    # A node that Ray will take away: its process leaves at a commit, and no step is repeated.
    after, repeated = newest(run), len(run.batches()) - len(run.committed())
    drained = next(node for node in nodes if node.node_id[:8] in host_of(run, 1))
    cluster.drain(drained)
    wait_until_all_train(run, job, after, size=1)
    assert len(run.batches()) - len(run.committed()) == repeated

    # A preemption: `ray job stop` sends SIGTERM to the driver.
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(120) == PREEMPTED, job.tail()
    wait_until(lambda: job.processes() == [])
    nodes.append(cluster.add(num_cpus=1))
    finish(run, start(run, (), {**cluster.environ, "OPTIONS": "--no-standby"}), size=2)


def test_the_example_trains(cluster: Raylets, nodes: list[Any], tmp_path: Path) -> None:
    command = [sys.executable, os.fspath(EXAMPLE), f"file://{tmp_path}/root"]
    environ = environment(cluster, HVDRECOVER_EVENTS=os.fspath(tmp_path / "events"))
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^loss of rank 0: (.*)$", done.stdout, re.MULTILINE)
    assert float(loss) < 0.01


def test_processes_see_the_gpus_of_all_slots_of_their_node(
    cluster: Raylets, nodes: list[Any], tmp_path: Path
) -> None:
    """Ray counts GPUs that are not there. The processes have the variables of the driver."""
    nodes.append(cluster.add(num_cpus=2, num_gpus=2))
    environ = environment(cluster, HVDRECOVER_EVENTS=os.fspath(tmp_path), WORD="a 'word'")
    done = subprocess.run(
        [sys.executable, "-c", SEES], env=environ, capture_output=True, text=True, timeout=180, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    devices, others = done.stdout.splitlines()[-1].split(" ", 1)
    assert sorted(devices.split(",")) == ["0", "1"]  # Ray assigns them to slots in any order
    assert others == f"a 'word' {tmp_path}"


def test_an_error_of_the_function_is_raised_in_the_driver(
    cluster: Raylets, nodes: list[Any], start: Start, tmp_path: Path
) -> None:
    """The class of the error is defined in the script. As always, the job tries twice."""
    run = RayRun(tmp_path)
    job = start(run, (), {**cluster.environ, "FAIL_AFTER": "2"})
    assert job.wait(180) == 0, job.tail()
    assert "raised ('no more', 2) which True" in run.log
    wait_until(lambda: job.processes() == [])


@LONG
def test_a_drill_runs_in_slots_of_ray(cluster: Raylets, nodes: list[Any], tmp_path: Path) -> None:
    """Takes a minute of a core: an undisturbed run, and one for each fault."""
    words = ["--output", os.fspath(tmp_path / "drill"), "--faults", FAULTS, "--no-standby", "--"]
    words += [sys.executable, "-m", "hvdrecover.examples.torch_digits", *QUICK]
    command = [sys.executable, os.fspath(DRILL), *words]
    done = subprocess.run(command, env=environment(cluster), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "drill" / "verdict.json").read_text())
    assert (found["recovers"], found["findings"]) == (True, [])
    assert {name for name, kind in found["kinds"].items() if kind["recovered"]} == set(FAULTS.split(","))


def test_preflight_checks_the_hosts_of_the_slots(
    cluster: Raylets, nodes: list[Any], start: Start, tmp_path: Path
) -> None:
    run = RayRun(tmp_path, epochs=1)
    finish(run, start(run, (), {**cluster.environ, "OPTIONS": "--no-standby --preflight"}), 2)
    (event,) = run.events("preflight")
    assert len(event["used"]) == 2 and event["excluded"] == {}
