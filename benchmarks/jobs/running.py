"""A job that trains without an end: watched, killed in part or whole, stopped and continued."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks.jobs import steps
from benchmarks.jobs.launchers import Launcher
from benchmarks.jobs.steps import Step
from benchmarks.measure import cpu_time
from hvdrecover.drill.run import Job, Run, wait_until
from hvdrecover.launch.processes import kill
from tests.support.jobs import GUARDIAN, STANDBY, running

COLLECTIVE_SECONDS = "10"  # Horovod's time-out, the same for all
_PATIENCE = 180.0  # seconds to wait for anything
_SETTLED = 2.0  # seconds of training before anything is measured
_IDLE, _HARDLY = 1.0, 0.03  # seconds without, and the part of them that is no work


class Running(Run):
    """A job; leaving its context kills all of it.

    Args:
        launcher: what starts it.
        framework: ``torch`` or ``tensorflow``; ``near``, for a training with a large state; ``peers``, for a
            small one that all peers can keep; or ``tiny``, for one of a few KB.
        folder: a new folder for all that it writes.
        durable: whether its commits are written.
    """

    def __init__(self, launcher: Launcher, framework: str, folder: Path, *, durable: bool = True) -> None:
        super().__init__(folder)
        self._launcher = launcher
        self._framework = framework
        self._durable = durable
        self._steps = folder / "steps"
        for each in (self._steps, self.root):
            each.mkdir()
        self._job = self._start()

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._job.kill()

    def settle(self) -> None:
        """Wait until all ranks have trained for a while since they all began, and all standbys wait."""
        wait_until(self._job, self._has_settled, "training for a while", _PATIENCE)
        if self._launcher.standbys:
            wait_until(self._job, self._all_stand_by, "standbys", _PATIENCE)

    def first_step(self) -> float:
        """Seconds from the start until all ranks have done a step."""
        began: dict[int, float] = {}
        for step in self.steps():
            began.setdefault(step.rank, step.time)
        return max(began.values()) - self._started

    def strike(self, rank: int) -> tuple[float, float]:
        """SIGKILL a rank's process.

        Returns:
            Seconds until all ranks have done a step together again, and the longest time of that in which no
            rank has done one.
        """
        last = next(step for step in reversed(self.steps()) if step.rank == rank)
        struck = time.monotonic()
        kill(last.pid)
        seconds = self._time_to_recover(struck)
        return seconds, steps.longest_pause(self.steps(), struck, struck + seconds)

    def strike_all(self) -> tuple[float, int]:
        """SIGKILL the processes of all ranks at once.

        Returns:
            Seconds until all ranks have done a step together again, and how many steps were lost.
        """
        before = self.steps()
        newest = {step.rank: step for step in before}
        struck = time.monotonic()
        for step in newest.values():
            kill(step.pid)
        seconds = self._time_to_recover(struck)
        killed = {step.pid for step in newest.values()}
        done = self.steps()
        last = max(step.number for step in done if step.pid in killed)
        first = min(step.number for step in done if step.time > struck and step.pid not in killed)
        return seconds, last + 1 - first

    def start_cold(self) -> float:
        """Kill all of it and start it again; seconds until all ranks have done a step together again."""
        struck = time.monotonic()
        self._job.kill()
        self._job = self._start()
        return self._time_to_recover(struck)

    def steps(self) -> list[Step]:
        """Return the steps done so far, in order of time."""
        return steps.read(self._steps)

    def standbys(self) -> list[int]:
        """The processes that stand by; one that has trained no longer does."""
        trained = {step.pid for step in self.steps()}
        return [pid for pid in running(self._job, *STANDBY) if pid not in trained]

    def guardians(self) -> list[int]:
        """The guardians' processes."""
        return running(self._job, *GUARDIAN)

    @property
    def running(self) -> bool:
        """Return whether its launcher runs."""
        return self._job.running

    def processes(self) -> list[int]:
        """All processes of the job."""
        return self._job.processes()

    def _start(self) -> Job:
        self._started = time.monotonic()
        module = f"benchmarks.jobs.{self._framework}_training"
        command = self._launcher.words(self.folder)
        command += [sys.executable, "-m", module] if self._launcher.python else [module]
        command += [self._launcher.way, os.fspath(self._steps)]
        if self._durable:
            command += ["--checkpoint", os.fspath(self.root)]
        environ = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": COLLECTIVE_SECONDS}
        return self.launch(command, {**environ, **self._launcher.settings})

    def _time_to_recover(self, struck: float) -> float:
        def look() -> float | None:
            return steps.recovered(self.steps(), struck, self._launcher.workers)

        recovered = wait_until(self._job, look, "recovery", _PATIENCE)
        assert recovered is not None
        return recovered - struck

    def _has_settled(self) -> bool:
        done = self.steps()
        newest = {step.rank: step for step in done}
        if len(newest) < self._launcher.workers:
            return False
        began = [next(step.time for step in done if step.pid == last.pid) for last in newest.values()]
        return min(step.time for step in newest.values()) - max(began) > _SETTLED

    def _all_stand_by(self) -> bool:
        """Return whether all standbys hardly use a processor any more, as those do that have imported all."""
        waiting = self.standbys()
        if len(waiting) != self._launcher.standbys:
            return False
        before = [cpu_time(pid) for pid in waiting]
        time.sleep(_IDLE)
        return all(cpu_time(pid) - used < _IDLE * _HARDLY for pid, used in zip(waiting, before, strict=True))


def suspend(processes: Sequence[int]) -> None:
    """SIGSTOP processes; some may have ended."""
    _signal(processes, signal.SIGSTOP)


def resume(processes: Sequence[int]) -> None:
    """SIGCONT processes; some may have ended."""
    _signal(processes, signal.SIGCONT)


def _signal(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)
