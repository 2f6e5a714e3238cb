"""The page of a drill: verdict, rules, times, advice, and a time line of each run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hvdrecover.drill import document, surroundings
from hvdrecover.drill.advice import Advice
from hvdrecover.drill.checks import rules
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.forecast import Forecast
from hvdrecover.drill.outcome import Outcome, Result, Struck
from hvdrecover.reporting import words
from hvdrecover.reporting.page.content import (
    Badge,
    Badges,
    Block,
    Column,
    Facts,
    Figure,
    Page,
    Paragraphs,
    Section,
    Table,
)
from hvdrecover.reporting.timeline import Stretch, Strike, Timeline, trace


def page(command: str, outcome: Outcome, advice: list[Advice], forecast: Forecast | None) -> Page:
    """Return what there is to say of a drill.

    Args:
        command: the training command.
        outcome: what has come of it.
        advice: what to set.
        forecast: goodput by how often the job fails, if it is known.
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
            *(Section(f"Run {number}", each) for number, each in enumerate(_runs(outcome), 1)),
            Section("Time to recover", [_times(outcome)]),
            *(
                [Section("What to set", [Facts({each.setting: each.text for each in advice})])]
                if advice
                else []
            ),
            *([_goodput(forecast)] if forecast is not None else []),
            *([_skipped(outcome)] if outcome.skipped else []),
            Section("The drill", [Facts(surroundings.facts(outcome))]),
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
    kept = [Badge(rule.name, "bad" if rule in broken else "good") for rule in rules.ALL]
    blocks: list[Block] = [Badges("Rules: green ones were kept by all runs, red ones are broken", kept)]
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
        counts = [str(kind["count"]), str(kind["recovered"])]
        rows.append([name, FAULTS[name].summary, *counts, *document.times(kind)])
    columns = [Column("fault"), Column("what happens", text=True)]
    columns += [Column(name, number=True) for name in ("count", "recovered", "median", "worst")]
    return Table("Seconds from each kind of fault until all ranks stepped again", columns, rows, cards=True)


def _runs(outcome: Outcome) -> Iterator[list[Block]]:
    """Return the blocks of each run. A fault has one number, and one name, on the whole page."""
    first = 1
    for result in outcome.results:
        yield _run(result, first)
        first += len(result.struck)


def _run(result: Result, first: int) -> list[Block]:
    rows = [
        [
            str(number),
            words.clock_time(each.time),
            each.strike.fault,
            each.whom,
            str(each.commit),
            _seconds(each),
        ]
        for number, each in enumerate(result.struck, first)
    ]
    columns = [Column("no.", number=True), Column("time"), Column("fault"), Column("whom")]
    columns += [Column("commit", number=True), Column("to recover", number=True)]
    blocks: list[Block] = [
        _timeline(result, first),
        Table("Faults of the run", columns, rows, cards=True),
    ]
    if result.missed:
        names = ", ".join(strike.fault for strike in result.missed)
        blocks.append(Paragraphs([f"The run was over too early for {names}."]))
    if result.unproven:
        blocks.append(Paragraphs([f"Not compared: {result.unproven}."]))
    if result.left.files:
        what = f"{result.left.files:,} files, {result.left.bytes:,} bytes"
        blocks.append(Paragraphs([f"Left in its TMPDIR, also by processes that were killed: {what}."]))
    return blocks


def _seconds(struck: Struck) -> str | Badge:
    if struck.seconds is not None:
        return words.duration(struck.seconds)
    return words.CONTINUED if struck.recovered else Badge("not recovered", "bad")


def _timeline(result: Result, first: int) -> Timeline:
    """The time line of a run, with the drill's faults in the place of what its guardians noticed of them."""
    traced = trace(result.log)
    lanes = {f"rank {rank}": rank for rank in traced.lanes}
    strikes = [
        Strike(
            number=number,
            time=each.time - traced.origin,
            kind=each.strike.fault,
            rank=lanes.get(each.whom),
            host="",
            detail=FAULTS[each.strike.fault].summary,
        )
        for number, each in enumerate(result.struck, first)
    ]
    struck = {each.time - traced.origin: each.seconds for each in result.struck if each.seconds is not None}
    return replace(traced, faults=strikes, lanes=_from_strikes(traced.lanes, struck))


def _from_strikes(
    lanes: Mapping[int, Sequence[Stretch]], struck: Mapping[float, float]
) -> dict[int, list[Stretch]]:
    """Return lanes whose recoveries begin when their faults struck, not when somebody noticed.

    Args:
        lanes: rank to its stretches, by what guardians and ranks report.
        struck: when each fault struck, in seconds since the run's beginning, to how many seconds later all
            ranks stepped again.
    """
    moved: dict[int, list[Stretch]] = {}
    for rank, stretches in lanes.items():
        lane = moved.setdefault(rank, [])
        for stretch in stretches:
            before = lane[-1] if lane and lane[-1].activity == "training" else None
            if before is not None and stretch.activity in ("recovery", "down"):
                causes = [
                    time
                    for time, seconds in struck.items()
                    if before.begin < time < stretch.begin < time + seconds
                ]
                if causes:
                    lane[-1] = replace(before, end=min(causes))
                    stretch = replace(stretch, begin=min(causes))
            lane.append(stretch)
    return moved


def _goodput(forecast: Forecast) -> Section:
    assumed, *_ = forecast.goodput
    names = ("a failure every", "goodput")
    columns = [Column(name, number=True) for name in names]
    rows = [[words.roughly(time), f"{share:.2%}"] for time, share in forecast.goodput.items()]
    told = (
        f"Assumed: a job like this one fails every {words.roughly(assumed)} on the average, at random; in "
        "the other rows, more often. Stall and interval of commits are those of the drill. A failure costs "
        f"{words.duration(forecast.recovery)}, as the {forecast.recoveries} recoveries did on the average. "
        "Of jobs with more ranks these numbers tell nothing."
    )
    table = Table("Goodput by how often the job fails", columns, rows)
    return Section("Goodput", [Paragraphs([told]), table])


def _skipped(outcome: Outcome) -> Section:
    intro = Paragraphs(["These faults need what this machine or run lacks."])
    return Section("Can't strike here", [intro, Facts(dict(outcome.skipped))])
