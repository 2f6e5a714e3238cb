"""Goodput: the share of its time that a job spends on work that counts. All times are in seconds.

The model: each of N workers fails at random, at a rate of 1 / MTBF, whatever it is at, and independently of
the others. So the job, which stands still when one of them fails, fails at random as well, at N times the
rate: ``M = MTBF / N``. It commits every ``I`` seconds; the first part of these is training, and the last
``S`` seconds are the stall of the commit. A failure takes the job back to its last commit, and ``R`` seconds
later it trains again, unless there is a failure meanwhile, which begins these R seconds anew.

An interval counts once it has passed without a failure. One of length x does that with probability exp(-x/M),
and an attempt that fails takes, on average, M - x / (exp(x/M) - 1). As there are exp(x/M) - 1 attempts that
fail for each that does not, which takes x, trying until there is success takes M (exp(x/M) - 1) seconds. For
x = R that is a recovery. An interval has exp(I/M) - 1 failed attempts, each followed by a recovery, so all in
all it takes (exp(I/M) - 1) (M + M (exp(R/M) - 1)), and of that I - S seconds count::

    goodput = (I - S) / (M exp(R/M) (exp(I/M) - 1))

That is Daly's equation for the time of a whole run, turned over. Its source is named in
`hvdrecover.elastic.durable.interval`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Conditions:
    """The quantities that goodput depends on.

    Attributes:
        interval: from the beginning of a commit to that of the next.
        stall: for how long a commit stalls training; shorter than the interval.
        recovery: from a failure to the first new step, and for commits that take time to become durable, that
            time as well.
        mtbf_worker: mean time between failures of one worker; infinity if it never fails.
        workers: their number.

    Raises:
        ValueError: a value that can't be.
    """

    interval: float
    stall: float
    recovery: float
    mtbf_worker: float
    workers: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.stall < self.interval < math.inf:
            reason = "a stall is from 0 on, and shorter than the interval, which is finite"
            raise ValueError(f"stall {self.stall!r}, interval {self.interval!r}: {reason}")
        if not 0.0 <= self.recovery < math.inf:
            raise ValueError(f"recovery: {self.recovery!r} is not a number of seconds from 0 on")
        if not self.mtbf_worker > 0.0:
            raise ValueError(f"mtbf_worker: {self.mtbf_worker!r} is not above 0")
        if self.workers < 1:
            raise ValueError(f"workers: {self.workers!r} is not a number from 1 on")

    @property
    def mtbf_job(self) -> float:
        """Mean time between failures of the whole job."""
        return self.mtbf_worker / self.workers


def goodput(conditions: Conditions) -> float:
    """Return the share of its time that such a job spends on work that counts, by the full formula."""
    mtbf, useful = conditions.mtbf_job, conditions.interval - conditions.stall
    if math.isinf(mtbf):
        return useful / conditions.interval
    # As a product of what can only underflow: with many failures, the exponentials are too large for a float.
    share = -math.expm1(-conditions.interval / mtbf)
    return useful / mtbf / share * math.exp(-(conditions.recovery + conditions.interval) / mtbf)
