"""A forecast of goodput for a job of a real size, from a drill's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from hvdrecover.drill.advice import Measured
from hvdrecover.drill.goodput import Conditions, exact, simulate

WORKERS = (8, 64, 512, 4096, 10_000)
_FAILURES = 20_000  # of a simulation, which makes its result good to about a hundredth of what is lost


@dataclass(frozen=True)
class Forecast:
    """The goodput of a job of so many workers, by formula and by simulation.

    Attributes:
        workers: their number.
        mtbf: seconds between failures of the job, on the average.
        formula: see `hvdrecover.drill.goodput.exact`.
        simulated: see `hvdrecover.drill.goodput.simulate`.
    """

    workers: int
    mtbf: float
    formula: float
    simulated: float


def forecast(
    measured: Measured, mtbf_worker: float, seed: int, workers: Sequence[int] = WORKERS
) -> list[Forecast]:
    """The goodput with the commit interval, stall and recoveries of a drill; empty if one is not known.

    Args:
        measured: by the drill.
        mtbf_worker: mean time between failures of one worker, in seconds.
        seed: of the simulation.
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
    found = []
    for number in workers:
        job = Conditions(measured.interval, measured.stall, mean(recoveries), mtbf_worker, number)
        simulated = simulate(job, _FAILURES * job.mtbf_job, seed).goodput
        found.append(Forecast(number, job.mtbf_job, exact(job), simulated))
    return found
