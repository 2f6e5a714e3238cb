"""The faults that strike jobs in turn, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.jobs.launchers import WORKERS
from benchmarks.jobs.running import Running


@dataclass
class Faults:
    """The cost of faults, in one job or several of the same kind."""

    # for each rank, the seconds from the SIGKILL of its process to the next step of all
    ranks: list[list[float]] = field(default_factory=lambda: [[] for _ in range(WORKERS)])
    # the longest part of each of these in which no rank has done a step
    pauses: list[float] = field(default_factory=list)
    all: list[float] = field(default_factory=list)  # the seconds from the SIGKILL of all ranks' processes
    lost: list[float] = field(default_factory=list)  # the steps that were lost by each of the latter

    @property
    def one(self) -> list[float]:
        """The seconds of all faults that struck one rank."""
        return [seconds for each in self.ranks for seconds in each]

    def strike_each(self, job: Running, times: int) -> None:
        """Kill one rank after the other, so many in all, each when the job has settled."""
        for number in range(times):
            job.settle()
            rank = number % WORKERS
            seconds, pause = job.strike(rank)
            self.ranks[rank].append(seconds)
            self.pauses.append(pause)

    def strike_all(self, job: Running, times: int = 1) -> None:
        """Kill all ranks at once, each time when the job has settled."""
        for _ in range(times):
            job.settle()
            seconds, lost = job.strike_all()
            self.all.append(seconds)
            self.lost.append(float(lost))
