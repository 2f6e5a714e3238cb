"""The outcome of a drill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hvdrecover.drill.advice import Measured
from hvdrecover.drill.checks.rank_local import RankLocal
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.checks.temporary import Left
from hvdrecover.drill.runs import Run
from hvdrecover.drill.schedule import Schedule, Strike
from hvdrecover.drill.slo import Numbers
from hvdrecover.reporting.records import Log
from hvdrecover.reporting.summary import Report

Verdict = Literal["recovers", "recovers, but for rank-local state", "does not recover"]


@dataclass
class Struck:
    """A fault that has struck.

    Attributes:
        strike: which, as planned.
        begun: when, in seconds of the monotonic clock.
        time: the same, in seconds since the Unix epoch.
        whom: as `hvdrecover.drill.faults.fault.Fault.whom` has it.
        commit: how many commits there were.
        recovered: whether training continued, and, if the fault was a lasting one, also when it was over.
        seconds: until all ranks of a new rendezvous had stepped; None if there had to be none.
    """

    strike: Strike
    begun: float
    time: float
    whom: str
    commit: int
    recovered: bool = False
    seconds: float | None = None


@dataclass
class Result:
    """The outcome of one run with faults.

    Attributes:
        run: the run.
        log: its events.
        report: what they come to.
        struck: its faults.
        missed: faults for which the run was over too early.
        findings: the rules that it has broken.
        rank_local: state of a rank's own that was another rank's after a recovery.
        compared: number of commits that were compared with the undisturbed run's, bit by bit.
        samples_lost: samples that were lost or repeated.
        left: what is left in its folder for temporary files, also of processes that were killed.
        unproven: what could not be compared, and why; empty if all was.
    """

    run: Run
    log: Log
    report: Report
    struck: list[Struck] = field(default_factory=list)
    missed: list[Strike] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    rank_local: RankLocal = field(default_factory=RankLocal)
    compared: int = 0
    samples_lost: int = 0
    left: Left = field(default_factory=Left)
    unproven: str = ""


@dataclass
class Outcome:
    """The outcome of a drill.

    Attributes:
        schedule: its faults.
        measured: stalls, silences and recoveries.
        longest_stall: the longest stall of training by a commit, in seconds.
        results: what has come of the runs with faults.
        skipped: faults that can't strike here: name to reason.
        folder: where all of it is.
    """

    schedule: Schedule
    measured: Measured
    longest_stall: float | None
    results: list[Result]
    skipped: Mapping[str, str]
    folder: Path

    @property
    def findings(self) -> list[Finding]:
        """The rules that were broken, each once."""
        return list(
            {finding.rule: finding for result in self.results for finding in result.findings}.values()
        )

    @property
    def numbers(self) -> Numbers:
        """Return what it has come to."""
        struck = [each.seconds for result in self.results for each in result.struck]
        return Numbers(
            stall_seconds=self.longest_stall,
            recovery_seconds=max((seconds for seconds in struck if seconds is not None), default=None),
            steps_lost=sum(result.report.steps_repeated for result in self.results),
            goodput=min(
                (r.report.goodput for r in self.results if r.report.goodput is not None), default=None
            ),
            samples_lost=sum(result.samples_lost for result in self.results),
            rank_local=max((len(result.rank_local.names) for result in self.results), default=0),
        )

    @property
    def recovers(self) -> bool:
        """Return whether the script recovers, rank-local state apart."""
        return not self.findings and any(result.struck for result in self.results)

    @property
    def rank_local(self) -> Finding | None:
        """The rank-local state that was another rank's after a recovery, in the first run with most of it."""
        most = max((each.rank_local for each in self.results), key=lambda each: len(each.names), default=None)
        return most.finding if most is not None else None

    @property
    def verdict(self) -> Verdict:
        """The verdict in words."""
        if not self.recovers:
            return "does not recover"
        return "recovers, but for rank-local state" if self.rank_local is not None else "recovers"
