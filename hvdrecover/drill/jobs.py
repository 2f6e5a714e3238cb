"""Start a training job on this host, wait for it, and end it without leaving a process behind."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvdrecover import config
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch import processes
from hvdrecover.launch.job import Job
from hvdrecover.record import Follower

PATIENCE = 400.0  # seconds to wait for anything, on a machine that is busy
ROOT_MAY_USE_MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
GUARDIAN = ("hvdrecover", "worker")
STANDBY = ("hvdrecover.launch.standby",)
_LOOK = 0.05  # seconds between looks
_SHARE = 10.0  # wait this many times as long as a look took to compute: the job needs the processor

T = TypeVar("T")


# -- the commands that start jobs --------------------------------------------------------------------------


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
    command = [_program("horovodrun"), "-np", str(workers), "--min-np", "1"]
    return [*command, "--host-discovery-script", discovery, "--network-interface", "lo"]


def supervised(*options: str, workers: int = 2) -> list[str]:
    """Return the command of ``hvdrecover run`` on this host.

    Args:
        options: more of its options.
        workers: number of workers.
    """
    return [sys.executable, "-m", "hvdrecover", "run", "-np", str(workers), *options, "--"]


def _program(name: str) -> str:
    """Return the path of a program of this Python environment."""
    return os.fspath(Path(sys.executable).with_name(name))


# -- the job -----------------------------------------------------------------------------------------------


class Run:
    """One run of a training script in its own folder, through any number of starts.

    Subclasses define how their script is started and which records it writes.

    Args:
        folder: takes the log, the events and whatever else the run writes.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @property
    def root(self) -> Path:
        """The folder of the checkpoint root."""
        return self.folder / "checkpoint"

    @property
    def log(self) -> str:
        """The output of the run's processes."""
        return (self.folder / "log.txt").read_text(errors="replace")

    def launch(self, command: Sequence[str], environ: Mapping[str, str] | None = None) -> Job:
        """Start a command as a job of this run.

        Args:
            command: the launcher, and the script with its arguments.
            environ: variables on top of this process's own.
        """
        settings = {"HVDRECOVER_EVENTS": os.fspath(self.folder / "events"), **ROOT_MAY_USE_MPI}
        # As in an activated environment: horovodrun looks for mpirun on the path.
        programs = os.fspath(Path(sys.executable).parent)
        settings["PATH"] = os.pathsep.join([programs, config.environment()["PATH"]])
        return Job(command, self.folder / "log.txt", {**settings, **(environ or {})})

    def finish(self, job: Job) -> None:
        """Wait until a job ends with exit code 0.

        Raises:
            HvdrecoverError: the job failed, or still runs.
        """
        try:
            if code := job.wait(PATIENCE):
                raise HvdrecoverError(f"the job ended with exit code {code}; its log ends with\n{job.tail()}")
        finally:
            job.kill()

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the recorded events of these kinds, in order of time; without kinds, all events."""
        return read_events(self.folder / "events", *kinds)

    def generations(self) -> dict[int, int]:
        """Return, for each generation, the commit that it resumed from."""
        return {int(event["generation"]): int(event["commit"]) for event in self.events("sync")}


def read_events(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the facts of the events of a run, in order of time; an empty list before the first event.

    Args:
        folder: the folder of the run.
        kinds: which events; none means all.
    """
    events = sorted(Follower(folder).look(), key=lambda event: event.time)
    return [dict(event.facts) for event in events if not kinds or event.kind in kinds]


def wait_until(job: Job, reached: Callable[[], T], what: str = "progress", patience: float = PATIENCE) -> T:
    """Wait until a function returns something true, and return that.

    Args:
        job: the job that makes it come true.
        reached: the function.
        what: a name for it, for the error.
        patience: seconds.

    Raises:
        HvdrecoverError: the job ended before, or it took too long. The message holds the end of the log.
    """
    deadline = time.monotonic() + patience
    while True:
        # Before the look: a job may record something and end between the look and this question.
        running, computed = job.running, time.thread_time()
        if found := reached():
            return found
        if not running or time.monotonic() > deadline:
            why = f"after {patience:.0f} s" if running else "and the job has ended"
            raise HvdrecoverError(f"no {what} {why}; the job's log ends with\n{job.tail()}")
        time.sleep(max(_LOOK, _SHARE * (time.thread_time() - computed)))


def running(job: Job, *module: str) -> list[int]:
    """Return the ids of the job's processes that run a Python module, named with its first arguments."""
    words = ["-m", *module]
    commands = {process: processes.command(process) for process in job.processes()}
    return [process for process, found in commands.items() if found[1 : 1 + len(words)] == words]
