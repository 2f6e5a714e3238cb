"""The number of virtual ranks of each process: pure decisions, which all processes take alike.

A process carries out neighbouring virtual ranks: process 0 the first ones, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Policy = Literal["equal", "by-speed"]
Counts = tuple[int, ...]
"""Number of virtual ranks by process."""
Seconds = Sequence[float | None]
"""Time of one virtual rank's part by process; None if it was not measured."""

_GAIN = 0.1  # minimum relative speed-up of a step before virtual ranks are reassigned
_UNKNOWN = 1.0  # seconds of a part, if no process has measured one


def equal(size: int, processes: int) -> Counts:
    """Return equal shares; the first processes have one more if the division leaves a remainder."""
    return tuple(size // processes + (process < size % processes) for process in range(processes))


def by_speed(size: int, seconds: Seconds) -> Counts:
    """Return the shares with which a step takes the least time, for parts of equal work.

    Each virtual rank goes to the process that would be done with it first. An unknown time counts as the mean
    of the known ones.
    """
    known = [each for each in seconds if each is not None]
    mean = sum(known) / len(known) if known else _UNKNOWN
    times = [mean if each is None else each for each in seconds]
    counts = [0] * len(times)
    for _ in range(size):
        ends = [(count + 1) * time for count, time in zip(counts, times, strict=True)]
        counts[ends.index(min(ends))] += 1
    return tuple(counts)


def reconsider(present: Counts, seconds: Seconds) -> Counts:
    """Return the shares to continue with: the present ones, unless others save a tenth of a step.

    Nothing changes while a process that has virtual ranks is not measured.
    """
    if any(each is None and count for count, each in zip(present, seconds, strict=True)):
        return present
    better = by_speed(sum(present), seconds)
    return better if step_time(better, seconds) < (1 - _GAIN) * step_time(present, seconds) else present


def step_time(counts: Counts, seconds: Seconds) -> float:
    """Return the seconds of a step: the slowest process sets them."""
    return max(count * (each or 0.0) for count, each in zip(counts, seconds, strict=True))


def run_of(counts: Counts, process: int) -> range:
    """Return the virtual ranks of a process; none if it joined after they were assigned."""
    return range(sum(counts[:process]), sum(counts[: process + 1]))


def in_words(counts: Counts) -> str:
    """Return a line that names the shares."""
    processes = f"{len(counts)} process{'es' if len(counts) > 1 else ''}"
    each = " + ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)} each"
    spares = counts.count(0)
    also = f", {spares} of them spare" if spares else ""
    return f"{sum(counts)} virtual ranks on {processes}{also}: {each}"
