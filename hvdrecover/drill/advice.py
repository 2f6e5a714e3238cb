"""Advice on settings, with reasons, from a drill's measurements. All times are in seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hvdrecover.elastic.durable.interval import CAP, Costs, Reason, best, share_lost
from hvdrecover.launch.hangs import FACTOR, LEAST_TIMEOUT
from hvdrecover.reporting.words import roughly

MARGIN = 2.0  # the grace period, as a multiple of what leaving took
DAY = 86400.0

Topic = Literal["commit interval", "durable interval", "grace period", "hang timeout"]

_WHY: dict[Reason, str] = {
    "optimum": "which loses least",
    "cap": f"as stalls may take {CAP:.0%} of the time",
    "least": "as a write takes that long",
}


@dataclass(frozen=True)
class Phases:
    """The times that the phases of one recovery took.

    Attributes:
        detect: from the fault until it was noticed.
        reset: leaving the other ranks.
        rendezvous: the rendezvous with those that are there.
        load: reading a durable commit; 0 if a memory held one.
        sync: bringing all ranks to one state.
        first_step: the first step after it.
    """

    detect: float
    reset: float
    rendezvous: float
    load: float
    sync: float
    first_step: float

    @property
    def seconds(self) -> float:
        """From the fault to the end of the first step."""
        return self.detect + self.reset + self.rendezvous + self.load + self.sync + self.first_step


@dataclass(frozen=True)
class Measured:
    """The measurements of a drill; None is not known, and no advice is given that needs it.

    Attributes:
        stall: for how long a commit in memory stalls training.
        interval: from one commit in memory to the next.
        write: how long making a commit durable takes, in the background.
        slowdown: how much longer training takes for a write beside it; None counts as 0.
        in_memory: recoveries after which the job resumed from a commit in memory.
        from_durable: recoveries after which it resumed from a durable one.
        silence: the longest time without progress in training.
        leave: the longest that a preemption needed, from SIGTERM to the exit.
    """

    stall: float | None = None
    interval: float | None = None
    write: float | None = None
    slowdown: float | None = None
    in_memory: tuple[Phases, ...] = ()
    from_durable: tuple[Phases, ...] = ()
    silence: float | None = None
    leave: float | None = None


@dataclass(frozen=True)
class Rates:
    """The rate of failures: the one assumption, which a drill can't measure.

    Attributes:
        workers: number of workers.
        mtbf_worker: mean time between failures of one worker.
    """

    workers: int
    mtbf_worker: float = 365 * DAY

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the job."""
        return self.mtbf_worker / self.workers

    @property
    def words(self) -> str:
        """The assumption."""
        return f"with {self.workers} workers one is lost every {roughly(self.mtbf)}"


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        topic: what it is about.
        seconds: the number to set.
        setting: how to set it.
        text: the same with its reasons, for people.
    """

    topic: Topic
    seconds: float
    setting: str
    text: str


def advise(measured: Measured, rates: Rates) -> list[Advice]:
    """All advice that the measured numbers allow."""
    found = (
        _commit_interval(measured, rates),
        _durable_interval(measured, rates),
        _grace(measured),
        _hang_timeout(measured),
    )
    return [advice for advice in found if advice is not None]


def _commit_interval(measured: Measured, rates: Rates) -> Advice | None:
    """Recoveries in place resume from a commit in memory, which costs its copy and nothing else."""
    if measured.stall is None or not measured.interval:
        return None
    costs = Costs(measured.stall, _restore(measured.in_memory), rates.mtbf)
    choice = best(costs)
    if not 0.0 < choice.seconds < math.inf:
        return None
    now, then = share_lost(costs, measured.interval), share_lost(costs, choice.seconds)
    setting = f"state.commit() every {roughly(choice.seconds)}"
    text = (
        f"{setting}, {_WHY[choice.reason]}: a commit stalls training for {roughly(measured.stall)}, and "
        f"{rates.words}. That loses {_percent(then)} of the time; with a commit every "
        f"{roughly(measured.interval)}, as in the drill, it is {_percent(now)}."
    )
    return Advice("commit interval", choice.seconds, setting, text)


def _durable_interval(measured: Measured, rates: Rates) -> Advice | None:
    """A durable commit costs a copy and what its write takes from training.

    To be on the safe side, each failure is taken for one that all memories are lost in.
    """
    if measured.stall is None or measured.write is None:
        return None
    stall = measured.stall + (measured.slowdown or 0.0)
    # What is being written when all memories are lost is lost as well.
    costs = Costs(stall, _restore(measured.from_durable) + measured.write, rates.mtbf)
    choice = best(costs, least=measured.write)
    if not 0.0 < choice.seconds < math.inf:
        return None
    setting = f"Checkpoint(every_seconds={_rounded(choice.seconds):g})"
    text = (
        f'{setting}, or interval="auto", {_WHY[choice.reason]}: a durable commit costs training '
        f"{roughly(stall)}, its write takes {roughly(measured.write)}, and {rates.words}, and with "
        "it, to be on the safe side, all that is in memory. That loses "
        f"{_percent(share_lost(costs, choice.seconds))} of the time."
    )
    return Advice("durable interval", choice.seconds, setting, text)


def _grace(measured: Measured) -> Advice | None:
    if measured.leave is None:
        return None
    # A job leaves at its next commit, and may find a write under way that its own has to wait for.
    worst = (measured.interval or 0.0) + 2.0 * (measured.write or 0.0)
    seconds = float(math.ceil(max(MARGIN * measured.leave, worst)))
    setting = f"--grace {seconds:g}"
    text = (
        f"{setting}, and more in the scheduler (Slurm: KillWait, Kubernetes: terminationGracePeriodSeconds): "
        f"after SIGTERM, leaving took up to {roughly(measured.leave)}; {MARGIN:g} times that, and at least "
        "the time from one commit to the next and two writes, is allowed for."
    )
    return Advice("grace period", seconds, setting, text)


def _hang_timeout(measured: Measured) -> Advice | None:
    if measured.silence is None:
        return None
    seconds = float(math.ceil(max(LEAST_TIMEOUT, FACTOR * measured.silence)))
    setting = f"--hang-timeout {seconds:g}"
    text = (
        f"{setting}: the longest time without progress was {roughly(measured.silence)}, and {FACTOR:g} "
        "times that is allowed for. It must be more than any step, evaluation or pause of a real run takes "
        "that is not inside recover.paused()."
    )
    return Advice("hang timeout", seconds, setting, text)


def _restore(recoveries: tuple[Phases, ...]) -> float:
    return median(phases.seconds for phases in recoveries) if recoveries else 0.0


def _rounded(seconds: float) -> float:
    """Two digits, so that nobody takes it for more exact than it is; never less."""
    step = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    return math.ceil(seconds / step - 1e-9) * step


def _percent(share: float) -> str:
    return f"{100.0 * min(share, 1.0):.2g}%"
