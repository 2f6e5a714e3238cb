"""Estimates of what durable commits cost and how often jobs are lost; pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

# What is assumed before there is anything to count: one failure in a day.
PRIOR_FAILURES, PRIOR_SECONDS = 1, 86400.0
_ENOUGH = 3  # stretches without a write, before what a write costs is known
_LEAST = 0.01  # share of a write's time that training loses at least


def mean_time_between_failures(seconds: float, failures: int) -> float:
    """Return what is expected after so many failures in so many seconds.

    The rate of failures is Gamma distributed: shape 1 and rate 24 h before there is anything to count, then
    shape 1 + failures and rate 24 h + time. This is one over the mean of that.
    """
    return (PRIOR_SECONDS + seconds) / (PRIOR_FAILURES + failures)


def cost_of_write(
    clean: Sequence[float], beside: Sequence[float], per_write: Sequence[int], write: float
) -> float:
    """Return how many seconds longer training takes for a write beside it.

    Args:
        clean: how long stretches from one commit to the next took without a write.
        beside: how long those took that had one, or a part of one.
        per_write: how many stretches recent writes had beside them.
        write: how long one takes. Training can't lose more than that, and is taken to lose all of it as long
            as there is too little to compare; and never less than a hundredth, as no write is for nothing.

    Returns:
        What the medians say, and one standard error more: writing too often costs more than too rarely.
    """
    if len(clean) < _ENOUGH or not beside or not per_write:
        return write
    longer = median(beside) - median(clean) + math.hypot(_error_of_median(beside), _error_of_median(clean))
    return min(max(longer * median(per_write), _LEAST * write), write)


def _error_of_median(values: Sequence[float]) -> float:
    """Its standard error, 1.2533 sigma / sqrt(n) for normal values, with sigma = 1.4826 median deviations."""
    middle = median(values)
    deviation = median(abs(value - middle) for value in values)
    return 1.2533 * 1.4826 * deviation / math.sqrt(len(values))
