"""The page of a drill: verdict, rules, times, advice, and a time line of each run."""

from __future__ import annotations

from hvdrecover.drill import document
from hvdrecover.drill.advice import Advice
from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.forecast import Forecast
from hvdrecover.drill.outcome import Outcome, Result
from hvdrecover.reporting import words
from hvdrecover.reporting.page.content import (
    Badge,
    Block,
    Column,
    Facts,
    Figure,
    Page,
    Paragraphs,
    Section,
    Table,
)
from hvdrecover.reporting.timeline import trace


def page(command: str, outcome: Outcome, advice: list[Advice], forecasts: list[Forecast]) -> Page:
    """Return what there is to say of a drill.

    Args:
        command: the training command.
        outcome: what has come of it.
        advice: what to set.
        forecasts: goodput of real jobs.
    """
    struck = sum(len(result.struck) for result in outcome.results)
    clean = outcome.rank_local is None
    verdict = Badge(outcome.verdict, ("good" if clean else "neutral") if outcome.recovers else "bad")
    runs = len(outcome.results)
    return Page(
        title=f"Drill of {command}",
        about=f"{struck} faults in {runs} run{'s' * (runs != 1)}, seed {outcome.schedule.seed}, "
        f"{outcome.schedule.processes} ranks",
        state=verdict,
        figures=_figures(outcome, struck),
        sections=[
            Section("Rules", _rules(outcome)),
            *([_rank_local(own)] if (own := outcome.rank_local) is not None else []),
            Section("Time to recover", [_times(outcome)]),
            *(
                Section(f"Run {number}", _run(result, number))
                for number, result in enumerate(outcome.results, 1)
            ),
            *(
                [Section("What to set", [Facts({each.setting: each.text for each in advice})])]
                if advice
                else []
            ),
            *([Section("Goodput of a real job", [_goodput(forecasts)])] if forecasts else []),
            *([_skipped(outcome)] if outcome.skipped else []),
        ],
        command="drill",
    )


def _figures(outcome: Outcome, struck: int) -> list[Figure]:
    numbers = outcome.numbers
    compared = sum(result.compared for result in outcome.results)
    return [
        Figure("faults", str(struck)),
        Figure("broken rules", str(len(outcome.findings))),
        Figure("commits compared", str(compared), "with the undisturbed run's, bit by bit"),
        Figure("slowest recovery", words.duration(numbers.recovery_seconds)),
        Figure("longest stall", words.duration(numbers.stall_seconds), "of training by a commit"),
        Figure("samples lost or repeated", f"{numbers.samples_lost:.0f}" if numbers.samples_lost else "0"),
    ]


def _rules(outcome: Outcome) -> list[Block]:
    broken = {finding.rule: finding for finding in outcome.findings}
    rows: list[list[str | Badge]] = [
        [Badge("broken", "bad") if rule in broken else Badge("kept", "good"), rule.name] for rule in rules.ALL
    ]
    blocks: list[Block] = [Table("Rules, and whether all runs kept them", [Column(""), Column("rule")], rows)]
    if broken:
        columns = [Column("broken"), Column("what was seen", text=True), Column("what to do", text=True)]
        seen = [[finding.rule.name, finding.message, finding.rule.remedy] for finding in broken.values()]
        blocks.insert(0, Table("Rules that were broken", columns, seen, cards=True))
    return blocks


def _rank_local(finding: Finding) -> Section:
    return Section("Rank-local state", [Paragraphs([f"{finding.message}.", finding.rule.remedy])])


def _times(outcome: Outcome) -> Block:
    rows: list[list[str]] = []
    for name, kind in document.kinds(outcome.results).items():
        times = [words.duration(kind[key]) for key in ("median_seconds", "worst_seconds")]
        counts = [str(kind["count"]), str(kind["recovered"])]
        rows.append([name, FAULTS[name].summary, *counts, *times])
    columns = [Column("fault"), Column("what happens", text=True)]
    columns += [Column(name, number=True) for name in ("count", "recovered", "median", "worst")]
    return Table("Seconds from each kind of fault until all ranks stepped again", columns, rows, cards=True)


def _run(result: Result, number: int) -> list[Block]:
    rows = [
        [each.strike.fault, str(each.strike.rank), str(each.commit), words.duration(each.seconds)]
        for each in result.struck
    ]
    columns = [Column("fault"), *(Column(name, number=True) for name in ("rank", "commit", "seconds"))]
    blocks: list[Block] = [trace(result.log), Table(f"Faults of run {number}", columns, rows)]
    if result.missed:
        names = ", ".join(strike.fault for strike in result.missed)
        blocks.append(Paragraphs([f"The run was over too early for {names}."]))
    if result.unproven:
        blocks.append(Paragraphs([f"Not compared: {result.unproven}."]))
    if result.left.files:
        what = f"{result.left.files:,} files, {result.left.bytes:,} bytes"
        blocks.append(Paragraphs([f"Left in its TMPDIR, also by processes that were killed: {what}."]))
    return blocks


def _goodput(forecasts: list[Forecast]) -> Block:
    names = ("workers", "a failure every", "goodput")
    columns = [Column(name, number=True) for name in names]
    rows = [[f"{each.workers:,}", words.roughly(each.mtbf), f"{each.goodput:.2%}"] for each in forecasts]
    return Table("Goodput with the drill's commit interval, stall and recoveries", columns, rows)


def _skipped(outcome: Outcome) -> Section:
    intro = Paragraphs(["These faults need what this machine or run lacks."])
    return Section("Can't strike here", [intro, Facts(dict(outcome.skipped))])
