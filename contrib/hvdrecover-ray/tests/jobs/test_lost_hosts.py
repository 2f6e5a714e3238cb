"""A job on a Ray cluster of several hosts: one is cut off, and one loses its power. Needs root."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvdrecover.drill.lab import Host, Lab
from hvdrecover.drill.run import Job
from lab_nodes import Nodes, ray_nodes
from tests.integration.conftest import LONG

SCRIPT = Path(__file__).with_name("scripts") / "ray_steps.py"
PATIENCE = 180.0  # seconds
Line = tuple[float, int, int, int, int]  # time, process, rank, ranks, step


@pytest.fixture
def cluster() -> Iterator[tuple[Lab, Nodes]]:
    with ray_nodes() as made:
        yield made


class Steps:
    """A job that records its steps. It starts on the first host, and each other host has a slot."""

    def __init__(self, lab: Lab, nodes: Nodes, folder: Path) -> None:
        self._ledger = folder / "ledger"
        self.root = f"file://{folder}/root"
        command = [sys.executable, os.fspath(SCRIPT), os.fspath(self._ledger), self.root]
        # A killed driver leaves its files in the folder for temporary files.
        environ = {"HVDRECOVER_EVENTS": os.fspath(folder / "events"), "TMPDIR": os.fspath(folder)}
        environ |= nodes.environ
        self.job = Job(lab.hosts[0].command(command), folder / "log.txt", environ)

    def lines(self) -> list[Line]:
        text = self._ledger.read_text() if self._ledger.exists() else ""
        return [tuple(json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def process_of(self, rank: int) -> int:
        return next(line[1] for line in reversed(self.lines()) if line[2] == rank)

    def survives(self, fault: Callable[[], object], size: int) -> float | None:
        """Return the seconds from a fault to the next step of ``size`` ranks; None if the job ends first."""
        fault()
        struck = time.time()
        settled = struck + 1.0  # a step before the fault may still be written
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            running = self.job.running
            for line in self.lines():
                if line[0] > settled and line[3] == size:
                    return line[0] - struck
            if not running:
                return None
            time.sleep(0.1)
        raise AssertionError(self.job.tail(40))


@pytest.fixture
def steps(cluster: tuple[Lab, Nodes], tmp_path: Path) -> Iterator[tuple[Steps, Lab, Nodes]]:
    lab, nodes = cluster
    job = Steps(lab, nodes, tmp_path)
    try:
        assert job.survives(lambda: None, 2) is not None, job.job.tail(60)
        yield job, lab, nodes
    finally:
        job.job.kill()


def used(job: Steps, lab: Lab) -> Host:
    """Return the host of rank 1."""
    return next(host for host in lab.hosts[1:] if job.process_of(1) in host.processes())


@LONG
def test_hosts_are_lost_and_come(steps: tuple[Steps, Lab, Nodes]) -> None:
    """Takes a minute of a core."""
    job, lab, nodes = steps
    lost = used(job, lab)
    print(f"cut off: {job.survives(lost.cut_off, 1):.1f} s")
    lost.power_off()  # Ray takes no lost node back
    lost.power_on()
    nodes.join(lost)
    print(f"a node added: {job.survives(lambda: None, 2):.1f} s")
    lost = used(job, lab)
    print(f"powered off: {job.survives(lost.power_off, 1):.1f} s")
