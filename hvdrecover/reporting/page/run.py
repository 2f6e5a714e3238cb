"""The page of a run."""

from __future__ import annotations

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
from hvdrecover.reporting.summary import PHASES, Fault, Report
from hvdrecover.reporting.timeline import Timeline

SHOWN = 500  # faults
_STATES = {
    "finished": Badge("finished", "good"),
    "ended": Badge("ended early", "bad"),
    "open": Badge("no end yet", "neutral"),
}


def page(folder: str, report: Report, timeline: Timeline) -> Page:
    """Return what there is to say of a run.

    Args:
        folder: of its event files, as the reader knows it.
        report: of the run.
        timeline: of the same run.
    """
    last = words.moment(report.end).isoformat(" ", "seconds")
    return Page(
        title=folder,
        about=f"{_when(report)}, {_who(timeline)}",
        state=_STATES[report.ending.outcome],
        figures=figures(report),
        sections=[
            Section("Time line", [timeline]),
            *([Section("Time to recover", [recoveries(report)])] if report.faults else []),
            Section("Faults", faults(report)),
            Section("The run", [_facts(report, last)]),
        ],
    )


def _when(report: Report) -> str:
    begin, end = words.moment(report.begin), words.moment(report.end)
    until = f"{end:%H:%M:%S}" if begin.date() == end.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    return f"{begin:%Y-%m-%d %H:%M:%S} to {until} ({begin:%Z})"


def _who(timeline: Timeline) -> str:
    hosts = {stretch.host for lane in timeline.lanes.values() for stretch in lane}
    ranks = len(timeline.lanes)
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{ranks} rank{'' if ranks == 1 else 's'} on {where}"


def figures(report: Report) -> list[Figure]:
    """The numbers of a run that a reader should see first."""
    overall = report.overall
    goodput = "-" if report.goodput is None else f"{report.goodput:.1%}"
    found = [
        Figure("wall time", words.duration(report.end - report.begin)),
        Figure("goodput", goodput, "of the time in committed steps"),
        Figure("faults", str(overall.count), f"{overall.recovered} recovered from" if overall.count else ""),
    ]
    if overall.median is not None:
        worst = f"median; worst {words.duration(overall.worst)}" if overall.recovered > 1 else ""
        found.append(Figure("time to recover", words.duration(overall.median), worst))
    repeated = f"and {report.commits_repeated} commits" if report.commits_repeated else ""
    return [*found, Figure("steps repeated", str(report.steps_repeated), repeated)]


def recoveries(report: Report) -> Table:
    """Return how long it took to recover from each kind of fault."""
    tallies = report.kinds | ({"all": report.overall} if len(report.kinds) > 1 else {})
    return Table(
        "Time to recover from each kind of fault",
        [Column("fault"), *(Column(name, True) for name in ("count", "recovered", "median", "worst"))],
        [
            (
                kind,
                str(each.count),
                str(each.recovered),
                words.median(each),
                words.duration(each.worst),
            )
            for kind, each in tallies.items()
        ],
    )


def faults(report: Report) -> list[Block]:
    """The faults, or the newest if there are very many, and how long each phase of the recovery took."""
    if not report.faults:
        return [Paragraphs(["There were none."])]
    numbered = list(enumerate(report.faults, 1))[-SHOWN:]
    left_out = len(report.faults) - len(numbered)
    phases = [Column(phase.replace("_", " "), True) for phase in PHASES]
    table = Table(
        "Faults, with the seconds of each phase of the recovery",
        [
            *(Column("no.", True), Column("time"), Column("fault"), Column("host"), Column("rank", True)),
            *(Column("to recover", True), *phases, Column("detail", text=True)),
        ],
        [_row(number, fault) for number, fault in numbered],
        cards=True,
    )
    note = [Paragraphs([f"The last {len(numbered)} of {len(report.faults)}."])] if left_out else []
    explained = Paragraphs(
        [
            "To recover: from the fault until all ranks were stepping again; a hang began when the process "
            "fell silent. The phases, in seconds, are those of the rank that stepped last; start is what "
            "passed until it set out to recover."
        ]
    )
    return [*note, table, explained]


def _row(number: int, fault: Fault) -> list[str | Badge]:
    recovery = fault.recovery
    spent = recovery.phases if recovery else {}
    return [
        str(number),
        words.clock_time(fault.time),
        fault.kind,
        fault.host,
        words.rank(fault.rank),
        words.to_recover(fault) if recovery or fault.continued else Badge(words.to_recover(fault), "bad"),
        *(f"{spent[phase]:.2f}" if phase in spent else "" for phase in PHASES),
        words.one_line(fault.detail),
    ]


def _facts(report: Report, last: str) -> Facts:
    told = {name: text for name, text in words.surroundings(report).items() if text}
    facts = {**words.facts(report, f"at {last}"), **told, "event files": str(report.files)}
    if report.passed_over:
        facts["passed over"] = f"{report.passed_over} lines that are not events"
    return Facts(facts)
