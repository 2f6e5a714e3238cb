"""A forecast of goodput for a job of a real size, from a drill's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from hvdrecover.drill.advice import Measured
from hvdrecover.drill.goodput import Conditions, goodput

WORKERS = (8, 64, 512, 4096, 10_000)


@dataclass(frozen=True)
class Forecast:
    """The goodput of a job of so many workers.

    Attributes:
        workers: their number.
        mtbf: seconds between failures of the job, on the average.
        goodput: see `hvdrecover.drill.goodput`.
    """

    workers: int
    mtbf: float
    goodput: float


def forecast(measured: Measured, mtbf_worker: float, workers: Sequence[int] = WORKERS) -> list[Forecast]:
    """The goodput with the commit interval, stall and recoveries of a drill; empty if one is not known.

    Args:
        measured: by the drill.
        mtbf_worker: mean time between failures of one worker, in seconds.
        workers: numbers of workers.
    """
    recoveries = [phases.seconds for phases in (*measured.in_memory, *measured.from_durable)]
    if (
        measured.stall is None
        or not measured.interval
        or not recoveries
        or measured.stall >= measured.interval
    ):
        return []
    jobs = [Conditions(measured.interval, measured.stall, mean(recoveries), mtbf_worker, n) for n in workers]
    return [Forecast(job.workers, job.mtbf_job, goodput(job)) for job in jobs]
