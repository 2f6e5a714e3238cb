"""Jobs on a real Ray cluster: processes and nodes that are lost, and what comes back to the driver."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvdrecover.examples.digits_run import DigitsRun
from hvdrecover.launch.job import Job
from hvdrecover.launch.processes import kill
from tests.integration.conftest import Start
from tests.integration.faults import SLOW, wait_until_all_train
from tests.integration.raylets import Raylets, raylets
from tests.integration.test_endings import wait_until
from tests.integration.test_kill_and_resume import assert_each_sample_once

SCRIPT = Path(__file__).with_name("scripts") / "ray_digits.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets() as started:
        yield started


@pytest.fixture
def nodes(cluster: Raylets) -> Iterator[list[Any]]:
    """Two nodes with room for a process each; what a test adds to the list goes with them."""
    added = [cluster.add(num_cpus=1), cluster.add(num_cpus=1)]
    yield added
    for node in added:
        cluster.kill(node)


def a_run(folder: Path, epochs: int = 2) -> DigitsRun:
    return DigitsRun(folder / "run", epochs, *SLOW, program=[os.fspath(SCRIPT)])


def newest(run: DigitsRun) -> int:
    return max(run.generations())


def host_of(run: DigitsRun, rank: int) -> str:
    """The name of the host that a rank is on now, as its events have it."""
    process = run.process_of(rank)
    (path,) = (run.folder / "events").glob(f"*-{process}.jsonl")
    host: str = json.loads(path.read_text().splitlines()[0])["host"]
    return host


def returned(run: DigitsRun) -> list[int]:
    (numbers,) = re.findall(r"^returned \((\d+), (\d+), (\d+)\)$", run.log, re.MULTILINE)
    return list(map(int, numbers))


def finish(run: DigitsRun, job: Job, size: int) -> None:
    """Wait for a good end: rank 0's result has come to the driver, and each sample was used once."""
    run.finish(job)
    assert returned(run) == [0, size, run.process_of(0)]
    assert_each_sample_once(run, padding=2)


def test_processes_and_nodes_come_and_go(
    cluster: Raylets, nodes: list[Any], start: Start, tmp_path: Path
) -> None:
    run = a_run(tmp_path, epochs=6)
    job = start(run, (), cluster.environ)
    wait_until_all_train(run, job, 0)
    hosts = {host_of(run, rank) for rank in (0, 1)}
    # The nodes have one address, and are two hosts.
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


def test_an_error_of_the_function_is_raised_in_the_driver(
    cluster: Raylets, nodes: list[Any], start: Start, tmp_path: Path
) -> None:
    """As itself, though its class is the script's own; after the second time, as with every error."""
    run = a_run(tmp_path)
    job = start(run, (), {**cluster.environ, "FAIL_AFTER": "2"})
    assert job.wait(180) == 0, job.tail()
    assert "raised ('no more', 2) which True" in run.log
    wait_until(lambda: job.processes() == [])
