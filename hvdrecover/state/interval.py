"""``Checkpoint(interval="auto")``: the time between durable commits, decided while a job runs.

An *interval* is the time between the beginnings of two durable commits. The *stall* is how much longer
training takes for one. Failures come at random, at a constant rate. All times are in seconds.

The interval that loses least is ``sqrt(2 * stall * mtbf)``, with the mean time between failures (J. W. Young,
"A first order approximation to the optimum checkpoint interval", Communications of the ACM 17 (9), 1974).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from hvdrecover.checkpoint.values import Json
from hvdrecover.clock import Clock
from hvdrecover.state.hooks import Hook

Reason = Literal["optimum", "cap", "least"]

CAP = 0.01  # share of the time that stalls may take
START = 60.0  # between durable commits until the first of them is complete
CHANGE = 0.2  # a decision stands until a better one differs by more than this share
_DAY = 86400.0  # before the first failure, assume one a day
_STRETCHES = 64  # number of recent stretches that count, from one commit to the next
_WRITES = 9  # number of recent writes that count
_EVERY = 8  # stretches between two decisions
_ENOUGH = 3  # stretches without a write, before the cost of a write is known
_LEAST = 0.01  # share of a write's time that training loses at least


def best(stall: float, mtbf: float, *, least: float = 0.0, cap: float = CAP) -> tuple[float, Reason]:
    """Return the interval that loses least, within limits, and the reason for it.

    Args:
        least: the interval is never shorter.
        cap: share of the time that stalls may take.
    """
    optimum, capped = math.sqrt(2.0 * stall * mtbf) + stall, stall / cap
    if least >= max(optimum, capped):
        return least, "least"
    return (optimum, "optimum") if optimum >= capped else (capped, "cap")


def cost_of_write(
    clean: Sequence[float], beside: Sequence[float], per_write: Sequence[int], write: float
) -> float:
    """Return how much longer training takes for a write beside it.

    Args:
        clean: durations of stretches from one commit to the next without a write.
        beside: durations of stretches with a write, or a part of one.
        per_write: the numbers of stretches that recent writes had beside them.
        write: duration of a write. Training cannot lose more than that, and is assumed to lose all of it as
            long as there is too little to compare.
    """
    if len(clean) < _ENOUGH or not beside or not per_write:
        return write
    longer = median(beside) - median(clean)
    # Their standard errors, for normal values: to write too often costs more than too rarely.
    longer += math.hypot(*(1.86 * _deviation(each) / math.sqrt(len(each)) for each in (clean, beside)))
    return min(max(longer * median(per_write), _LEAST * write), write)


def _deviation(values: Sequence[float]) -> float:
    middle = median(values)
    return median(abs(value - middle) for value in values)


@dataclass(frozen=True)
class Decision:
    """The interval and its reason.

    Attributes:
        seconds: the interval.
        reason: ``least`` means twice the time of a write, so that half of the time is without one.
        stall: how much longer training takes for one durable commit.
        restore: duration of the last start from a durable commit; None if there was none.
        mtbf: mean time between losses of the whole job.
    """

    seconds: float
    reason: Reason
    stall: float
    write: float
    restore: float | None
    mtbf: float

    def describe(self) -> str:
        """Return the decision in words."""
        why = {
            "optimum": "which loses least",
            "cap": f"as it may take {CAP:.0%} of the time",
            "least": "twice as long as a write takes",
        }[self.reason]
        return (
            f"commits become durable every {self.seconds:.3g} s from now on, {why}: one costs training "
            f"{self.stall:.2g} s and takes {self.write:.2g} s to write, and a loss of the whole job is "
            f"reckoned with every {self.mtbf / 3600:.3g} h"
        )


class Pacing(Hook):
    """Measures the costs of durable commits, counts losses of the job, and decides.

    The counts go into each commit, so they outlive the job. Ranks other than 0 only carry them along.
    ``on``: whether the user wants it; if not, it does nothing.
    """

    key = "pacing"

    def __init__(self, clock: Clock, *, on: bool) -> None:
        self._clock = clock
        self.on = on
        self._before = 0.0  # how long the job had run when this process took over
        self._since = clock.monotonic()
        self._failures = 0
        self._restore: float | None = None
        self._began: float | None = None
        self._is_beside = False
        self._clean: deque[float] = deque(maxlen=_STRETCHES)
        self._beside: deque[float] = deque(maxlen=_STRETCHES)
        self._writes: deque[float] = deque(maxlen=_WRITES)
        self._per_write: deque[int] = deque(maxlen=_WRITES)
        self._stretches_of_write = 0
        self._new = 0  # stretches since the last decision
        self._decision: Decision | None = None

    @property
    def seconds(self) -> float:
        """Return the present interval."""
        return START if self._decision is None else self._decision.seconds

    # -- the part of each commit -----------------------------------------------------------------------

    def capture(self) -> Json | None:
        """Return how many seconds the job has run, and how often it was lost."""
        return {"seconds": self._ran(), "failures": self._failures} if self.on else None

    def load(self, value: Json | None) -> None:
        """Return to the counts of a commit."""
        self._before, self._failures = _counted(value)
        self._since = self._clock.monotonic()
        self.interrupt()

    def resumed(self, value: Json | None) -> Json | None:
        """Count a loss of the whole job: it is resumed from a durable commit."""
        seconds, failures = _counted(value)
        return {"seconds": seconds, "failures": failures + 1} if self.on else None

    def restored(self, seconds: float) -> None:
        """Note how long the job took to resume from a durable commit, first step included."""
        self._restore = seconds

    # -- measurements, on rank 0 -----------------------------------------------------------------------

    def begin(self, *, beside: bool) -> None:
        """A stretch begins, from one commit to the next; beside a write or not."""
        self._began, self._is_beside = self._clock.monotonic(), beside

    def end(self) -> None:
        """The stretch ends."""
        if self._began is not None:
            (self._beside if self._is_beside else self._clean).append(self._clock.monotonic() - self._began)
            self._stretches_of_write += self._is_beside
            self._new += 1
            self._began = None

    def interrupt(self) -> None:
        """Something else took time in this stretch and in the write beside it: neither counts."""
        self._began, self._stretches_of_write = None, 0

    def written(self, seconds: float) -> None:
        """A commit has become durable; the write took this long."""
        self._writes.append(seconds)
        if self._stretches_of_write:
            self._per_write.append(self._stretches_of_write)
        self._stretches_of_write, self._new = 0, _EVERY

    def decide(self) -> Decision | None:
        """Return a new decision; None if the one before stands."""
        if self._new < _EVERY or not self._writes:
            return None
        self._new = 0
        write, before = median(self._writes), self.seconds
        stall = cost_of_write(self._clean, self._beside, self._per_write, write)
        # The rate of failures is Gamma distributed: shape 1 and rate 24 h, before there is anything to count.
        mtbf = (_DAY + self._ran()) / (1 + self._failures)
        seconds, reason = best(stall, mtbf, least=2.0 * write)
        if self._decision is not None and abs(seconds - before) <= CHANGE * before:
            return None
        self._decision = Decision(seconds, reason, stall, write, self._restore, mtbf)
        return self._decision

    def _ran(self) -> float:
        return self._before + self._clock.monotonic() - self._since


def _counted(value: Any) -> tuple[float, int]:
    """Return the seconds and failures that a commit holds; zeros if it holds none."""
    if not isinstance(value, dict):
        return 0.0, 0
    return float(value["seconds"]), int(value["failures"])
