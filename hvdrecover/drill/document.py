"""The outcome of a drill, as JSON; described in ``docs/drill.md``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hvdrecover.drill.advice import Advice
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.outcome import Outcome, Result, Struck
from hvdrecover.reporting import words


def of(outcome: Outcome, advice: Sequence[Advice], missed: Mapping[str, str]) -> dict[str, Any]:
    """The whole of it.

    Args:
        outcome: what has come of the drill.
        advice: what to set.
        missed: what was asked for and is missed.
    """
    return {
        "folder": str(outcome.folder),
        "recovers": outcome.recovers,
        "verdict": outcome.verdict,
        "rank_local": _finding(outcome.rank_local) if outcome.rank_local is not None else None,
        "seed": outcome.schedule.seed,
        "processes": outcome.schedule.processes,
        "findings": [_finding(finding) for finding in outcome.findings],
        "skipped": dict(outcome.skipped),
        "numbers": asdict(outcome.numbers),
        "missed": dict(missed),
        "measured": asdict(outcome.measured),
        "advice": [asdict(each) for each in advice],
        "kinds": kinds(outcome.results),
        "runs": [_run(result) for result in outcome.results],
    }


def kinds(results: Sequence[Result]) -> dict[str, Any]:
    """Fault to what there was of it: how often it struck, and the seconds until all ranks stepped again."""
    struck = [each for result in results for each in result.struck]
    found: dict[str, Any] = {}
    for name in FAULTS:
        mine = [each for each in struck if each.strike.fault == name]
        seconds = [each.seconds for each in mine if each.seconds is not None]
        if mine:
            found[name] = {
                "count": len(mine),
                "recovered": sum(each.recovered for each in mine),
                "lasting": FAULTS[name].lasting,
                "median_seconds": statistics.median(seconds) if seconds else None,
                "worst_seconds": max(seconds, default=None),
            }
    return found


def times(kind: Mapping[str, Any]) -> tuple[str, str]:
    """The median and the worst time to recover from one of `kinds`, in words."""
    if kind["median_seconds"] is None and kind["recovered"] == kind["count"]:
        return words.CONTINUED, ""
    return words.duration(kind["median_seconds"]), words.duration(kind["worst_seconds"])


def _run(result: Result) -> Mapping[str, Any]:
    return {
        "folder": result.run.folder.name,
        "codes": result.run.codes,
        "commits_compared": result.compared,
        "temporary": asdict(result.left),
        "unproven": result.unproven,
        "struck": [_struck(each) for each in result.struck],
        "missed": [strike.fault for strike in result.missed],
        "findings": [_finding(finding) for finding in result.findings],
        "rank_local": sorted(result.rank_local.names),
    }


def _finding(finding: Finding) -> dict[str, str]:
    return {"rule": finding.rule.name, "message": finding.message, "remedy": finding.rule.remedy}


def _struck(struck: Struck) -> dict[str, Any]:
    facts = {**asdict(struck.strike), "struck_at": struck.commit}
    return {**facts, "recovered": struck.recovered, "seconds": struck.seconds}
