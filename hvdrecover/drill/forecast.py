"""A forecast of goodput, from a drill's numbers and one assumption: how often the job fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from hvdrecover.drill.advice import DAY, Measured, Rates
from hvdrecover.drill.goodput import Conditions, goodput

LEAST = 3  # recoveries; the mean of fewer says little
OTHERS = (7 * DAY, DAY, 3600.0, 600.0)  # seconds between failures of the job, if it fails more often


@dataclass(frozen=True)
class Forecast:
    """The goodput of a job like the drilled one, by how often it fails.

    Attributes:
        recoveries: number of recoveries that were measured.
        recovery: their mean, in seconds.
        goodput: seconds between failures, on the average, to goodput; see `hvdrecover.drill.goodput`. The
            first is the assumption, in the others the job fails more often.
    """

    recoveries: int
    recovery: float
    goodput: dict[float, float]


def forecast(measured: Measured, rates: Rates, others: Sequence[float] = OTHERS) -> Forecast | None:
    """The goodput with the commit interval, stall and recoveries of a drill; None if one is not known.

    Nothing is said about larger jobs, whose rendezvous and commits take longer than those that were measured.

    Args:
        measured: by the drill.
        rates: the assumption.
        others: more times between failures of the job.
    """
    recoveries = [phases.seconds for phases in (*measured.in_memory, *measured.from_durable)]
    stall, interval = measured.stall, measured.interval
    if stall is None or interval is None or stall >= interval or len(recoveries) < LEAST:
        return None
    times = [rates.mtbf, *(other for other in others if other < rates.mtbf)]
    recovery = mean(recoveries)
    shares = {time: goodput(Conditions(interval, stall, recovery, time, 1)) for time in times}
    return Forecast(len(recoveries), recovery, shares)
