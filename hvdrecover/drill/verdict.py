"""The verdict of a drill: as text for people, and as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hvdrecover.drill.check import Finding
from hvdrecover.drill.schedule import Schedule, Strike
from hvdrecover.reporting.text import counted

SCHEMA = 1


@dataclass
class Struck:
    """A fault that has struck."""

    strike: Strike
    commit: int  # the number of commits when it struck
    recovered: bool = False  # training continued; if the fault lasts, also after its end
    seconds: float | None = None  # until all ranks trained again; None if they never stopped


@dataclass
class Result:
    """The result of one run with faults."""

    folder: Path
    struck: list[Struck] = field(default_factory=list)
    missed: list[Strike] = field(default_factory=list)  # the run ended too early for these
    findings: list[Finding] = field(default_factory=list)
    rank_local: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # exit codes of its starts
    compared: int = 0  # commits
    not_compared: str = ""  # from which commit on, and why; '' if all commits were compared
    samples_miscounted: int = 0
    steps_repeated: int = 0

    def facts(self) -> dict[str, Any]:
        """Return the result for JSON."""
        struck = [
            {
                **asdict(each.strike),
                "struck_at": each.commit,
                "recovered": each.recovered,
                "seconds": each.seconds,
            }
            for each in self.struck
        ]
        return {
            **asdict(self),
            "folder": self.folder.name,
            "struck": struck,
            "missed": [strike.fault for strike in self.missed],
            "findings": [finding.facts() for finding in self.findings],
        }


@dataclass
class Outcome:
    """The outcome of a drill."""

    folder: Path
    schedule: Schedule
    results: list[Result]
    skipped: Mapping[str, str]  # for each fault that cannot strike here, the reason
    notes: Sequence[Finding]  # about rank-local state; they do not count as failures

    @property
    def findings(self) -> list[Finding]:
        """The failed checks of all runs, each check once."""
        found: dict[str, Finding] = {}
        for result in self.results:
            for finding in result.findings:
                found.setdefault(finding.check, finding)
        return list(found.values())

    @property
    def recovers(self) -> bool:
        """Return whether the script recovers, rank-local state aside."""
        return not self.findings and any(result.struck for result in self.results)

    @property
    def verdict(self) -> str:
        """The verdict in a few words."""
        if not self.recovers:
            return "does not recover"
        return "recovers, but for rank-local state" if self.notes else "recovers"

    def kinds(self) -> dict[str, dict[str, Any]]:
        """For each fault that struck: how often, how often the run recovered, and the seconds it took."""
        by_name: dict[str, list[Struck]] = {}
        for result in self.results:
            for each in result.struck:
                by_name.setdefault(each.strike.fault, []).append(each)
        kinds = {}
        for name, struck in by_name.items():
            seconds = [each.seconds for each in struck if each.seconds is not None]
            kinds[name] = {
                "count": len(struck),
                "recovered": sum(each.recovered for each in struck),
                "median_seconds": statistics.median(seconds) if seconds else None,
                "worst_seconds": max(seconds, default=None),
            }
        return kinds

    def json(self) -> str:
        """Return everything as JSON; ``docs/drill.md`` describes it."""
        document = {
            "schema": SCHEMA,
            "folder": str(self.folder),
            "recovers": self.recovers,
            "verdict": self.verdict,
            "seed": self.schedule.seed,
            "processes": self.schedule.processes,
            "findings": [finding.facts() for finding in self.findings],
            "rank_local": [finding.facts() for finding in self.notes],
            "skipped": dict(self.skipped),
            "kinds": self.kinds(),
            "runs": [result.facts() for result in self.results],
        }
        return json.dumps(document, indent=1) + "\n"

    def text(self) -> str:
        """Return the verdict as text for a person."""
        commits = sum(result.compared for result in self.results)
        steps = sum(result.steps_repeated for result in self.results)
        miscounted = sum(result.samples_miscounted for result in self.results)
        lines = [f"verdict: the script {self.verdict}", ""]
        for finding in [*self.findings, *self.notes]:
            mark = "ok, but" if finding in self.notes else "FAILED"
            what = [finding.message, f"What to do: {finding.remedy}"]
            lines += [f"{mark}: {finding.check}", *(f"  {line}" for line in what), ""]
        lines.append(f"{'fault':16} {'struck':>6} {'recovered':>9}  training again after")
        for name, kind in self.kinds().items():
            lines.append(f"{name:16} {kind['count']:6} {kind['recovered']:9}  {_time(kind)}")
        lines += [f"{name:16} not possible here: needs {why}" for name, why in self.skipped.items()]
        lines += ["", f"{commits} commits compared bit by bit with those of the undisturbed run"]
        lines.append(f"{miscounted} samples lost or repeated, {counted(steps, 'step')} repeated")
        lines += dict.fromkeys(result.not_compared for result in self.results if result.not_compared)
        lines.append(f"all files are in {self.folder}; a run's story:")
        lines += [f"  hvdrecover report {result.folder / 'events'}" for result in self.results[:3]]
        return "\n".join(lines) + "\n"


def _time(kind: Mapping[str, Any]) -> str:
    if kind["median_seconds"] is None:
        return "it never stopped" if kind["recovered"] == kind["count"] else "it did not"
    words = f"{kind['median_seconds']:.1f} s"
    return words if kind["count"] == 1 else f"{words} (median; worst {kind['worst_seconds']:.1f} s)"
