"""The cost to a job of being prepared for faults."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs.launchers import STANDBY, UNGUARDED
from benchmarks.jobs.running import Running, resume, suspend
from benchmarks.jobs.steps import Step
from benchmarks.measure import cpu_time, proportional, stopwatch
from hvdrecover import heartbeat

_BLOCK = 2.0  # seconds for which one of two jobs trains
_TAKEN_UP = 0.3  # seconds at a block's beginning that don't count: the caches hold what is the other job's
_CALLS = 200_000


@dataclass
class Steady:
    """Seconds of a step on average, for each block of steps."""

    # with guardians that watch, heartbeats that are read, and standbys that wait
    guarded: list[float] = field(default_factory=list)
    # with the same state, without any of that; each block beside one of the other's
    unguarded: list[float] = field(default_factory=list)

    def differences(self) -> list[float]:
        """Return how much longer a step takes, as a part of the other's time, for each pair of blocks."""
        return [ours / theirs - 1 for ours, theirs in zip(self.guarded, self.unguarded, strict=True)]


@dataclass(frozen=True)
class Waiting:
    """The needs of processes that wait while others train."""

    standbys: list[int]  # memory of each standby, in bytes; of what is shared with others, its part
    guardians: list[int]  # the same of each guardian
    standby_seconds: float  # processor time of all standbys while they were watched
    guardian_seconds: float  # the same of all guardians


def steady(framework: str, folder: Path, blocks: int) -> Steady:
    """Compare the steps of two jobs, one of which is stopped while the other one trains.

    Nothing becomes durable meanwhile, as writing would only add noise to both.
    """
    folder.mkdir()
    with (
        Running(STANDBY, framework, folder / "guarded", durable=False) as guarded,
        Running(UNGUARDED, framework, folder / "unguarded", durable=False) as unguarded,
    ):
        jobs = (guarded, unguarded)
        for job in jobs:
            job.settle()
        processes = {job: job.processes() for job in jobs}
        spans: dict[Running, list[tuple[float, float]]] = {job: [] for job in jobs}
        suspend([*processes[guarded], *processes[unguarded]])
        for number in range(blocks):
            for job in jobs if number % 2 else reversed(jobs):  # A B B A
                resume(processes[job])
                began = time.monotonic() + _TAKEN_UP
                time.sleep(_BLOCK)
                spans[job].append((began, time.monotonic()))
                suspend(processes[job])
        done = {job: job.steps() for job in jobs}
    return Steady(*([_average(done[job], *span) for span in spans[job]] for job in jobs))


def _average(steps: Sequence[Step], began: float, ended: float) -> float:
    """Seconds from one step of rank 0 to the next, on average; a median would hide what comes but rarely."""
    times = [step.time for step in steps if step.rank == 0 and began < step.time < ended]
    return (times[-1] - times[0]) / (len(times) - 1)


def waiting(job: Running, seconds: float) -> Waiting:
    """Watch those that wait in a job that trains."""
    standbys, guardians = job.standbys(), job.guardians()
    before = [sum(map(cpu_time, each)) for each in (standbys, guardians)]
    time.sleep(seconds)
    after = [sum(map(cpu_time, each)) for each in (standbys, guardians)]
    used = [late - early for early, late in zip(before, after, strict=True)]
    return Waiting([*map(proportional, standbys)], [*map(proportional, guardians)], *used)


def heartbeats() -> list[float]:
    """Seconds of one `heartbeat()`, by several measures; nobody reads this process's page."""

    def many() -> None:
        for _ in range(_CALLS):
            heartbeat.heartbeat()

    return [stopwatch(many) / _CALLS for _ in range(5)]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile of two values or more."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
