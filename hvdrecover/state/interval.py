"""``Checkpoint(interval="auto")``: the time between durable commits, decided while a job runs.

The interval that loses least is ``sqrt(2 * stall * mtbf)``: with the *stall*, how much longer training takes
for one durable commit, and the mean time between failures, which come at random (J. W. Young, "A first order
approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdrecover.checkpoint.store import Progress
from hvdrecover.checkpoint.values import Json
from hvdrecover.clock import Clock
from hvdrecover.state.hooks import Hook

CAP = 0.01  # share of the time that stalls may take
START = 60.0  # between durable commits until the first of them is complete
CHANGE = 0.2  # a decision stands until a better one differs by more than this share
_DAY = 86400.0  # before the first failure, assume one a day
_STRETCHES = 64  # number of recent stretches that count, from one commit to the next
_ENOUGH = 3  # stretches without a write, before the cost of a write is known
_LEAST = 0.01  # share of a write's time that training loses at least


def best(stall: float, mtbf: float, write: float) -> float:
    """Return the interval that loses least, in seconds.

    Stalls take at most `CAP` of the time, and half of the time is without a write.
    """
    return max(math.sqrt(2.0 * stall * mtbf) + stall, stall / CAP, 2.0 * write)


def cost_of_write(clean: Sequence[float], beside: Sequence[float], write: float) -> float:
    """Return how much longer training takes for a write beside it.

    ``clean`` and ``beside`` are durations from one commit to the next, without and with a write. While there
    is too little to compare, training is assumed to lose all of the write's time.
    """
    if len(clean) < _ENOUGH or not beside:
        return write
    lost = 1.0 - median(clean) / max(median(beside), 1e-9)
    return write * max(lost, _LEAST)


@dataclass(frozen=True)
class Decision:
    """The interval and its reasons, all in seconds; see `best`."""

    seconds: float
    stall: float
    write: float
    mtbf: float

    def describe(self) -> str:
        return (
            f"commits become durable every {self.seconds:.3g} s from now on: one costs training "
            f"{self.stall:.2g} s and takes {self.write:.2g} s to write, and a loss of the whole job is "
            f"reckoned with every {self.mtbf / 3600:.3g} h"
        )


class Pacing(Hook):
    """Measures the costs of durable commits, counts losses of the job, and decides.

    The counts go into each commit, so they outlive the job. Ranks other than 0 only carry them along.
    """

    key = "pacing"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started = clock.monotonic()  # the job's, if it had run without an interruption
        self._failures = 0
        self._began: tuple[float, bool] | None = None  # a stretch: when, and whether beside a write
        self._stretches: dict[bool, deque[float]] = {
            beside: deque(maxlen=_STRETCHES) for beside in (False, True)
        }
        self._write: Any = None  # the last one that has counted
        self.decision: Decision | None = None

    @property
    def seconds(self) -> float:
        return START if self.decision is None else self.decision.seconds

    def capture(self) -> Json:
        return {"seconds": self._clock.monotonic() - self._started, "failures": self._failures}

    def load(self, value: Json | None) -> None:
        seconds, self._failures = _counted(value)
        self._started = self._clock.monotonic() - seconds
        self.interrupt()

    def resumed(self, value: Json | None) -> Json:
        """Count a loss of the whole job: it is resumed from a durable commit."""
        seconds, failures = _counted(value)
        return {"seconds": seconds, "failures": failures + 1}

    def begin(self, *, beside: bool) -> None:
        """A stretch begins, from one commit to the next; beside a write or not."""
        self._began = self._clock.monotonic(), beside

    def interrupt(self) -> None:
        """Something else took time in this stretch, so it does not count."""
        self._began = None

    def end(self, progress: Progress) -> Decision | None:
        """A stretch ends; return a decision if a write has ended, and the one before does not stand."""
        if self._began is not None and progress.error is None:
            began, beside = self._began
            self._stretches[beside].append(self._clock.monotonic() - began)
        if progress.last_durable in (None, self._write):
            return None
        self._write, write = progress.last_durable, progress.seconds
        stall = cost_of_write(self._stretches[False], self._stretches[True], write)
        # The rate of failures is Gamma distributed: shape 1 and rate 24 h, before there is anything to count.
        mtbf = (_DAY + self._clock.monotonic() - self._started) / (1 + self._failures)
        seconds = best(stall, mtbf, write)
        if self.decision is not None and abs(seconds - self.seconds) <= CHANGE * self.seconds:
            return None
        self.decision = Decision(seconds, stall, write, mtbf)
        return self.decision


def _counted(value: Any) -> tuple[float, int]:
    """Return the seconds and failures that a commit holds; zeros if it holds none."""
    return (float(value["seconds"]), int(value["failures"])) if isinstance(value, dict) else (0.0, 0)
