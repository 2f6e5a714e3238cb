"""The number of virtual ranks of each process: pure decisions, which all processes take alike.

A process carries out a run of virtual ranks: the first one the first run, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Policy = Literal["equal", "by-speed"]
Counts = tuple[int, ...]
"""Number of virtual ranks by process."""

_GAIN = 0.1  # of the time of a step; a smaller one is not worth that others carry a virtual rank out
_UNKNOWN = 1.0  # seconds; of a part, if no process has measured one


def equal(size: int, processes: int) -> Counts:
    """Deal virtual ranks out in equal shares; if that can't be, the first processes have one more.

    Args:
        size: number of virtual ranks.
        processes: number of processes; of more than virtual ranks, the last have nothing to do.
    """
    return tuple(size // processes + (process < size % processes) for process in range(processes))


def by_speed(size: int, seconds: Sequence[float | None]) -> Counts:
    """Deal virtual ranks out so that a step takes the least time.

    Each goes to the process that would be done with it first: for parts of equal work, no other shares have a
    step end earlier.

    Args:
        size: number of virtual ranks.
        seconds: what the part of one takes on each process; None where that is unknown, which counts as the
            mean of the others.
    """
    known = [each for each in seconds if each is not None]
    mean = sum(known) / len(known) if known else _UNKNOWN
    times = [mean if each is None else each for each in seconds]
    counts = [0] * len(times)
    for _ in range(size):
        ends = [(count + 1) * time for count, time in zip(counts, times, strict=True)]
        counts[ends.index(min(ends))] += 1
    return tuple(counts)


def reconsider(present: Counts, seconds: Sequence[float | None]) -> Counts:
    """Return the shares to continue with: the present ones, unless others save a tenth of a step.

    Args:
        present: the present shares.
        seconds: as for `by_speed`. Nothing changes while a process that has something to do is not measured.
    """
    if any(each is None and count for count, each in zip(present, seconds, strict=True)):
        return present
    better = by_speed(sum(present), seconds)
    return better if step_time(better, seconds) < (1 - _GAIN) * step_time(present, seconds) else present


def step_time(counts: Counts, seconds: Sequence[float | None]) -> float:
    """Return the seconds that a step takes: those of the process that needs longest."""
    return max(count * (each or 0.0) for count, each in zip(counts, seconds, strict=True))


def run_of(counts: Counts, process: int) -> range:
    """Return the virtual ranks that a process carries out; none if it has come since they were dealt out."""
    return range(sum(counts[:process]), sum(counts[: process + 1]))


def in_words(counts: Counts) -> str:
    """Return a line that says who carries out how many."""
    processes = f"{len(counts)} process{'es' if len(counts) > 1 else ''}"
    each = " + ".join(map(str, counts)) if len(counts) <= 8 else f"{min(counts)} to {max(counts)} each"
    spares = counts.count(0)
    also = f", {spares} of them spare" if spares else ""
    return f"{sum(counts)} virtual ranks on {processes}{also}: {each}"
