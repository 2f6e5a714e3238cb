"""Goodput: the share of its time that a job spends on work that counts. All times are in seconds.

The model: each of N workers fails at random, at a rate of 1 / MTBF, whatever it is at, and independently of
the others. So the job, which stands still when one of them fails, fails at random as well, at N times the
rate: ``M = MTBF / N``. It commits every ``I`` seconds; the first part of these is training, and the last
``S`` seconds are the stall of the commit. A failure takes the job back to its last commit, and ``R`` seconds
later it trains again, unless there is a failure meanwhile, which begins these R seconds anew.

To first order: in a second there are 1 / I stalls of S seconds each and 1 / M failures, each of which loses R
seconds and, as it comes at any moment of an interval with the same probability, half an interval::

    share lost = S / I + (I / 2 + R) / M

That is right while failures are much rarer than commits and recoveries are long. In full: an interval counts
once it has passed without a failure. One of length x does that with probability exp(-x/M), and an attempt
that fails takes, on average, M - x / (exp(x/M) - 1). As there are exp(x/M) - 1 attempts that fail for each
that does not, which takes x, trying until there is success takes M (exp(x/M) - 1) seconds. For x = R that is
a recovery. An interval has exp(I/M) - 1 failed attempts, each followed by a recovery, so all in all it takes
(exp(I/M) - 1) (M + M (exp(R/M) - 1)), and of that I - S seconds count::

    goodput = (I - S) / (M exp(R/M) (exp(I/M) - 1))

That is Daly's equation for the time of a whole run, turned over. Its source is named in
`hvdrecover.elastic.durable.interval`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hvdrecover.elastic.durable.interval import Costs, share_lost


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


@dataclass(frozen=True)
class Simulated:
    """The result of a simulated job.

    Attributes:
        goodput: share of the time spent on training that was not lost.
        failures: how many there were.
        interrupted: how many of them came while the job was recovering from another.
    """

    goodput: float
    failures: int
    interrupted: int


def first_order(conditions: Conditions) -> float:
    """Goodput by the first-order formula; 0 where it would be negative, far from where it is right."""
    costs = Costs(conditions.stall, conditions.recovery, conditions.mtbf_job)
    return max(0.0, 1.0 - share_lost(costs, conditions.interval))


def exact(conditions: Conditions) -> float:
    """Goodput by the full formula."""
    mtbf, useful = conditions.mtbf_job, conditions.interval - conditions.stall
    if math.isinf(mtbf):
        return useful / conditions.interval
    # As a product of what can only underflow: with many failures, the exponentials are too large for a float.
    share = -math.expm1(-conditions.interval / mtbf)
    return useful / mtbf / share * math.exp(-(conditions.recovery + conditions.interval) / mtbf)


def simulate(conditions: Conditions, seconds: float, seed: int) -> Simulated:
    """Let a job run for so long, with failures at random moments.

    The failures of all workers together are drawn at once: they are a Poisson process, whose number in a
    span of time is Poisson distributed and whose moments are then uniform. What the job does between two
    failures follows from the time between them. What it has trained since its last commit when the time is
    over counts.

    Args:
        conditions: the job.
        seconds: how long it runs, above 0. It takes memory and time for each failure: less than a second for
            a million of them.
        seed: of the random numbers; equal seeds give equal results.

    Raises:
        ValueError: the time is not above 0, or infinite.
    """
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds: {seconds!r} is not a finite time above 0")
    random = np.random.default_rng(seed)
    failures = int(random.poisson(seconds / conditions.mtbf_job))
    moments = np.sort(random.uniform(0.0, seconds, failures))
    gaps = np.diff(moments, prepend=0.0, append=seconds)
    recoveries = np.full(failures + 1, conditions.recovery)
    recoveries[0] = 0.0  # the job begins without one
    trained = np.maximum(gaps - recoveries, 0.0)
    useful = conditions.interval - conditions.stall
    commits, rest = np.divmod(trained, conditions.interval)
    in_progress = min(float(rest[-1]), useful)
    goodput = (float(commits.sum()) * useful + in_progress) / seconds
    interrupted = int(np.count_nonzero(gaps[1:-1] < conditions.recovery))
    return Simulated(goodput, failures, interrupted)
