"""The harness of acceptance tests: start jobs, kill their processes, read their files.

Acceptance tests import the harness from here, and nothing else that is private to the package. When the
harness of the package moves, only this file changes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdrecover.drill.run import ROOT_MAY_USE_MPI, Job, supervised, wait_until
from hvdrecover.launch.processes import command, kill, kill_marked, marked
from tests.support.digits_run import PATIENCE, TRAINING_SAMPLES, Batch, DigitsRun, read_events

__all__ = [
    "DRIVER",
    "FENCED",
    "GUARDIAN",
    "PATIENCE",
    "PREEMPTED",
    "ROOT_MAY_USE_MPI",
    "SHARED_MEMORY",
    "STANDBY",
    "SUPERVISOR",
    "TRAINING_SAMPLES",
    "Batch",
    "Commit",
    "DigitsRun",
    "Job",
    "command",
    "commits",
    "durable",
    "elastic",
    "failing_hosts",
    "kill",
    "kill_marked",
    "marked",
    "mpi",
    "mpirun",
    "near_folder",
    "near_root",
    "parent",
    "read_events",
    "run_job",
    "running",
    "static",
    "supervised",
    "wait_until",
]

# Exit codes of `hvdrecover run`, as docs/commands.md lists them.
PREEMPTED = 75
FENCED = 77

SHARED_MEMORY = Path("/dev/shm")

# The first words of processes of a job; see `running`.
GUARDIAN = ("hvdrecover", "worker")
STANDBY = ("hvdrecover.launch.training", "standby")
SUPERVISOR = ("hvdrecover", "run")
DRIVER = ("hvdrecover.launch.horovodrun",)  # of Horovod

_COMMIT = re.compile(r"g(\d+)-c(\d+)")


class Commit(NamedTuple):
    """A commit in a checkpoint root; a later one compares as greater."""

    generation: int
    number: int

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"g{self.generation:04}-c{self.number:08}"


def run_job(
    command: Sequence[str],
    log: Path,
    environ: Mapping[str, str] | None = None,
    *,
    code: int | None = 0,
    patience: float = PATIENCE,
) -> str:
    """Run a job to its end; return its log. It must have an exit code; None stands for any failure."""
    job = Job(command, log, environ)
    try:
        found = job.wait(patience)
        assert found == code or (code is None and found != 0), job.tail(80)
    finally:
        job.kill()
    return log.read_text(errors="replace")


def static(workers: int) -> list[str]:
    """Return the command of ``horovodrun`` with a fixed number of workers on this host."""
    return [_program("horovodrun"), "--gloo", "-np", str(workers)]


def mpi(workers: int) -> list[str]:
    """Return the command of ``horovodrun --mpi``."""
    return [_program("horovodrun"), "--mpi", "-np", str(workers), "--mpi-args=--oversubscribe"]


def mpirun(workers: int) -> list[str]:
    """Return the command of ``mpirun``."""
    return [_program("mpirun"), "--oversubscribe", "-np", str(workers)]


def elastic(hosts: Path, workers: int = 2) -> list[str]:
    """Return the command of elastic ``horovodrun`` with at least one worker.

    Args:
        hosts: file with a line ``host:slots`` for each host; it may change while the job runs.
        workers: number of workers to start with.
    """
    discovery = shlex.join([sys.executable, "-m", "hvdrecover", "discover", "file", os.fspath(hosts)])
    words = [_program("horovodrun"), "-np", str(workers), "--min-np", "1"]
    return [*words, "--host-discovery-script", discovery, "--network-interface", "lo"]


def _program(name: str) -> str:
    """Return the path of a program of this Python environment."""
    return os.fspath(Path(sys.executable).with_name(name))


def parent(process: int) -> int:
    """Return the id of a process's parent; 0 if the process is gone."""
    return psutil.Process(process).ppid() if psutil.pid_exists(process) else 0


def running(job: Job, *module: str) -> list[int]:
    """Return the ids of the job's processes that run a Python module, named with its first arguments."""
    words = ["-m", *module]
    commands = {process: command(process) for process in job.processes()}
    return [process for process, found in commands.items() if found[1 : 1 + len(words)] == words]


def commits(root: Path) -> list[Commit]:
    """Return the complete commits of a root on this host, oldest first."""
    names = (path.parent.name for path in root.glob("g*/MANIFEST.json"))
    return sorted(
        Commit(int(found[1]), int(found[2])) for name in names if (found := _COMMIT.fullmatch(name))
    )


def durable(root: Path) -> int:
    """Return the number of the newest complete commit of a root; 0 if there is none."""
    return max((commit.number for commit in commits(root)), default=0)


def near_folder(base: Path = SHARED_MEMORY) -> Path:
    """Return the folder that holds all near roots of this user."""
    return base / f"hvdrecover-{os.getuid()}"


def near_root(root: Path, folder: Path) -> Path | None:
    """Return the near root of a checkpoint root, if there is one in the folder of a user's near roots."""
    for owner in folder.glob("*/root.json"):
        if json.loads(owner.read_text())["url"] == f"file://{root}":
            return owner.parent
    return None


def failing_hosts(events: Path) -> dict[str, int]:
    """Return how often each host was reported as failing."""
    counts: dict[str, int] = {}
    for line in (events / "failing-hosts").read_text().splitlines():
        host = json.loads(line)["host"]
        counts[host] = counts.get(host, 0) + 1
    return counts
