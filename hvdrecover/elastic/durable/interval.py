"""The interval between commits that loses least, as pure functions. All times are in seconds.

An *interval* is the time from the beginning of one commit to the beginning of the next, the *stall* the part
of it in which the commit stalls training, and failures come at random, at a constant rate.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the
ACM 17 (9), 1974, pp. 530-531. J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22 (3), 2006, pp. 303-312.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

CAP = 0.01  # share of the time that stalls may take

Reason = Literal["optimum", "cap", "least"]


@dataclass(frozen=True)
class Costs:
    """The costs of commits and failures.

    Attributes:
        stall: for how long a commit stalls training. 0 is a commit that costs nothing; infinity
            one that is never worth it.
        restore: what a failure costs besides the work since the last commit: from the failure to the first
            new step. It has no part in the optimum (`daly`), but in what is lost.
        mtbf: mean time between failures of the whole job; infinity if it never fails.

    Raises:
        ValueError: one of them is negative or NaN.
    """

    stall: float
    restore: float
    mtbf: float

    def __post_init__(self) -> None:
        for name in ("stall", "restore", "mtbf"):
            _check(name, getattr(self, name))


@dataclass(frozen=True)
class Interval:
    """A decision.

    Attributes:
        seconds: from the beginning of a commit to that of the next; infinity for no further commit.
        reason: what decided: the ``optimum`` itself, the ``cap`` on stalls, or the ``least`` that may be.
    """

    seconds: float
    reason: Reason


def young(stall: float, mtbf: float) -> float:
    """Young's first approximation, ``sqrt(2 * stall * mtbf)``: good where the stall is much shorter."""
    return 0.0 if stall == 0.0 or mtbf == 0.0 else math.sqrt(2.0 * stall * mtbf)


def daly(stall: float, mtbf: float) -> float:
    """Seconds of training between two commits, without the stall, that lose least: Daly's equation (37).

    The time to restore has no part in it: a failure costs that much whatever the interval is. At a stall of
    2 MTBF the equation steps up from 0.89 MTBF to 1.

    Args:
        stall: seconds that a commit stalls.
        mtbf: mean time between failures.

    Returns:
        ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d``, or M where d >= 2M.
    """
    if stall == 0.0 or mtbf == 0.0:
        return 0.0
    if math.isinf(mtbf) or stall >= 2.0 * mtbf:
        return mtbf
    ratio = stall / (2.0 * mtbf)
    return young(stall, mtbf) * (1.0 + math.sqrt(ratio) / 3.0 + ratio / 9.0) - stall


def best(costs: Costs, *, least: float = 0.0, cap: float = CAP) -> Interval:
    """The interval that loses least, within limits.

    Commits that cost nothing are made as often as can be. Those that cost something are never made if the job
    never fails.

    Args:
        costs: what is known.
        least: the interval is never shorter; such as the time that a write takes.
        cap: share of the time that stalls may take, above 0 and below 1.

    Raises:
        ValueError: the least interval is negative or NaN, or the cap is not such a share.
    """
    _check("least", least)
    if not 0.0 < cap < 1.0:
        raise ValueError(f"cap: {cap!r} is not a share above 0 and below 1")
    optimum = daly(costs.stall, costs.mtbf) + costs.stall
    capped = costs.stall / cap
    if least >= max(optimum, capped):
        return Interval(least, "least")
    return Interval(optimum, "optimum") if optimum >= capped else Interval(capped, "cap")


def share_lost(costs: Costs, interval: float) -> float:
    """The share of the time lost, to first order: ``stall / interval + (interval / 2 + restore) / mtbf``.

    This holds while the share is small; it may exceed 1.

    Args:
        costs: what is known; an mtbf of 0 loses everything.
        interval: from the beginning of a commit to that of the next, above 0.

    Raises:
        ValueError: the interval is not above 0.
    """
    if not interval > 0.0:
        raise ValueError(f"interval: {interval!r} is not above 0")
    if math.isinf(interval):
        return 0.0 if math.isinf(costs.mtbf) else 1.0
    stalls = costs.stall / interval
    if math.isinf(costs.mtbf):
        return stalls
    return stalls + (interval / 2.0 + costs.restore) / costs.mtbf if costs.mtbf > 0.0 else 1.0


def _check(name: str, seconds: float) -> None:
    if not seconds >= 0.0:
        raise ValueError(f"{name}: {seconds!r} is not a number of seconds from 0 on")
