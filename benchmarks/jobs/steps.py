"""The training steps that were done, when and by whom."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple


class Step(NamedTuple):
    """One rank's part of one training step.

    Attributes:
        time: when it was done, in seconds of the monotonic clock, which all processes of a host share.
        pid: the process that did it.
        rank: its rank.
        number: of the step.
    """

    time: float
    pid: int
    rank: int
    number: int


class Steps:
    """Writes down the steps of this process, each at once, so that SIGKILL loses none."""

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._file = os.open(folder / f"{self._pid}.steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def done(self, rank: int, number: int) -> None:
        """Note that a step is done."""
        os.write(self._file, f"{time.monotonic()} {self._pid} {rank} {number}\n".encode())


def read(folder: Path) -> list[Step]:
    """All steps, in order of time."""
    found = []
    for path in folder.glob("*.steps"):
        lines = path.read_text().splitlines(keepends=True)
        for moment, pid, rank, number in (line.split() for line in lines if line.endswith("\n")):
            found.append(Step(float(moment), int(pid), int(rank), int(number)))
    return sorted(found)


def recovered(steps: Sequence[Step], struck: float, workers: int) -> float | None:
    """Return when all ranks had done a step together again, at least one of them as a new process.

    A survivor may end the step in which the other one was killed; that is no recovery.

    Returns:
        When the last rank had done the first such step; None if that is still to come.
    """
    before = {step.pid for step in steps if step.time <= struck}
    together: dict[int, dict[int, int]] = defaultdict(dict)  # step to rank to process
    for step in steps:
        if step.time > struck:
            ranks = together[step.number]
            ranks[step.rank] = step.pid
            if len(ranks) == workers and not before.issuperset(ranks.values()):
                return step.time
    return None


def longest_pause(steps: Sequence[Step], since: float, until: float) -> float:
    """Return the longest time between two moments in which no rank has done a step, in seconds."""
    times = [since, *(step.time for step in steps if since < step.time < until), until]
    return max(late - early for early, late in pairwise(times))
