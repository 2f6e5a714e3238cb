"""``Checkpoint(interval="auto")``: how often commits become durable, decided while a job runs."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from hvdrecover.checkpoint.values import Json
from hvdrecover.clock import Clock
from hvdrecover.elastic.companions import Kept
from hvdrecover.elastic.durable.costs import cost_of_write, mean_time_between_failures
from hvdrecover.elastic.durable.interval import CAP, Costs, Reason, best

START = 60.0  # seconds between durable commits until the first of them is complete
CHANGE = 0.2  # a decision stands until a better one differs by more than this
_STRETCHES = 64  # how many recent stretches, and writes, count
_WRITES = 9
_EVERY = 8  # stretches between two decisions


@dataclass(frozen=True)
class Decision:
    """The time between durable commits, and the reason; times in seconds.

    Attributes:
        seconds: from the beginning of one write to that of the next.
        reason: what decided; ``least``: it is twice the time of a write, so that half of the time is
            without one.
        stall: how much longer training takes for one durable commit.
        write: how long writing it takes.
        restore: what the last start from a durable commit took; None if there was none.
        mtbf: mean time between losses of the whole job.
    """

    seconds: float
    reason: Reason
    stall: float
    write: float
    restore: float | None
    mtbf: float

    def describe(self) -> str:
        """For people."""
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


class Pacing(Kept):
    """Measures what durable commits cost, counts what failures there were, and decides.

    What it counts goes into each commit, so that it outlives the job. Ranks other than 0 only carry it along.

    Args:
        clock: where times come from.
        on: whether the user wants it; if not, it does nothing.
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
        self._new = 0
        self._decision: Decision | None = None

    @property
    def seconds(self) -> float:
        """Return how long after the beginning of a write the next one is due."""
        return START if self._decision is None else self._decision.seconds

    # -- what a commit holds of it ---------------------------------------------------------------------

    def capture(self) -> Json | None:
        """Return how many seconds the job has run, and how often it was lost."""
        if not self.on:
            return None
        seconds = self._before + self._clock.monotonic() - self._since
        return {"seconds": seconds, "failures": self._failures}

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

    # -- what is measured, on rank 0 -------------------------------------------------------------------

    def begin(self, *, beside: bool) -> None:
        """A stretch begins, from one commit to the next; beside a write or not."""
        self._began, self._is_beside = self._clock.monotonic(), beside

    def end(self) -> None:
        """It ends."""
        if self._began is not None:
            (self._beside if self._is_beside else self._clean).append(self._clock.monotonic() - self._began)
            self._stretches_of_write += self._is_beside
            self._new += 1
            self._began = None

    def interrupt(self) -> None:
        """Something else took time in this stretch, and in the write beside it: neither counts."""
        self._began, self._stretches_of_write = None, 0

    def written(self, seconds: float) -> None:
        """A commit has become durable; the write took this long."""
        self._writes.append(seconds)
        if self._stretches_of_write:
            self._per_write.append(self._stretches_of_write)
        self._stretches_of_write, self._new = 0, _EVERY

    def decide(self) -> Decision | None:
        """A new decision; None if the one before stands."""
        if self._new < _EVERY or not self._writes:
            return None
        self._new = 0
        decision, before = self._considered(), self.seconds
        if self._decision is not None and abs(decision.seconds - before) <= CHANGE * before:
            return None
        self._decision = decision
        return decision

    def _considered(self) -> Decision:
        write = median(self._writes)
        stall = cost_of_write(self._clean, self._beside, self._per_write, write)
        ran = self._before + self._clock.monotonic() - self._since
        mtbf = mean_time_between_failures(ran, self._failures)
        choice = best(Costs(stall, self._restore or 0.0, mtbf), least=2.0 * write)
        return Decision(choice.seconds, choice.reason, stall, write, self._restore, mtbf)


def _counted(value: Any) -> tuple[float, int]:
    """Return the seconds and failures that a commit holds; zeros if it holds none, or nonsense."""
    seconds, failures = (value.get("seconds"), value.get("failures")) if isinstance(value, dict) else (0, 0)
    if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
        return 0.0, 0
    return float(seconds), failures if isinstance(failures, int) and failures >= 0 else 0
