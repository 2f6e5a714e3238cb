"""The report of a run as one HTML page, which needs no other file, no script and no network."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path

from hvdrecover.errors import ConfigError
from hvdrecover.reporting import text, timeline
from hvdrecover.reporting.summary import PHASES, Report, Run
from hvdrecover.reporting.text import html as _e
from hvdrecover.reporting.timeline import Lanes
from hvdrecover.version import __version__

SHOWN = 500  # faults
_STATES = {
    "finished": ("good", "finished"),
    "ended": ("bad", "ended early"),
    "open": ("neutral", "no end yet"),
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_EXPLAINED = (
    "To recover: from the fault until all ranks were stepping again; a hang began when the process fell "
    "silent. The phases, in seconds, are those of the rank that stepped last; start is what passed until it "
    "set out to recover."
)


def write(title: str, run: Run, path: Path) -> None:
    """Write the page of a run; a file that is there is replaced.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(page(title, run), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--html", f"'{path}' cannot be written: {error.strerror}") from error


def page(title: str, run: Run) -> str:
    """Return the page of a run as HTML."""
    report = run.report()
    lanes = timeline.trace(run, report)
    tone, state = _STATES[report.outcome]
    last = text.moment(report.end).isoformat(" ", "seconds")
    facts = text.facts(report, f"at {last}")
    versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
    facts |= {name: fact for name, fact in (("machine", report.machine), ("versions", versions)) if fact}
    sections = [_section("Time line", timeline.draw(run, report, lanes))]
    if report.faults:
        sections.append(_section("Time to recover", _recoveries(report)))
    sections.append(_section("Faults", _faults(report)))
    sections.append(_section("Storage", _facts(_storage(report))))
    sections.append(_section("The run", _facts(facts)))
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{_e(title)} - hvdrecover</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="kicker">hvdrecover report {_badge(state, tone)}</p>
<h1>{_e(title)}</h1>
<p class="about">{_e(f"{_when(report)}, {_who(lanes)}")}</p>
</header>
<main>
{_figures(report)}{"".join(sections)}</main>
<footer><p>hvdrecover {__version__}</p></footer>
</body>
</html>
"""


# -- sections ------------------------------------------------------------------------------------------


def _when(report: Report) -> str:
    begin, end = text.moment(report.begin), text.moment(report.end)
    until = f"{end:%H:%M:%S}" if begin.date() == end.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    return f"{begin:%Y-%m-%d %H:%M:%S} to {until} ({begin:%Z})"


def _who(lanes: Lanes) -> str:
    hosts = {stretch.host for lane in lanes.values() for stretch in lane}
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    return f"{text.counted(len(lanes), 'rank')} on {where}"


def _figures(report: Report) -> str:
    """Return the numbers that a reader should see first."""
    overall = report.overall
    found = [("wall time", text.duration(report.end - report.begin), "")]
    goodput = "-" if report.goodput is None else f"{report.goodput:.1%}"
    found.append(("goodput", goodput, "of the time in committed steps"))
    recovered = f"{overall.recovered} recovered from" if overall.count else ""
    found.append(("faults", str(overall.count), recovered))
    if overall.median is not None:
        worst = f"median; worst {text.duration(overall.worst)}" if overall.recovered > 1 else ""
        found.append(("time to recover", text.duration(overall.median), worst))
    commits = f"and {report.commits_repeated} commits" if report.commits_repeated else ""
    found.append(("steps repeated", str(report.steps_repeated), commits))
    parts = [
        f"<div><dt>{_e(name)}</dt><dd>{_e(value)}{f'<small>{_e(note)}</small>' if note else ''}</dd></div>\n"
        for name, value, note in found
    ]
    return f'<dl class="figures">\n{"".join(parts)}</dl>\n'


def _recoveries(report: Report) -> str:
    rows = [[_e(kind), *cells] for kind, *cells in text.tallies(report)]
    columns = {"fault": "", **dict.fromkeys(("count", "recovered", "median", "worst"), "number")}
    return _table("Time to recover from each kind of fault", columns, rows)


def _faults(report: Report) -> str:
    """Return the faults, or the newest if there are very many, with the phases of their recoveries."""
    if not report.faults:
        return "<p>There were none.</p>\n"
    numbered = list(enumerate(report.faults, 1))[-SHOWN:]
    phases = {phase.replace("_", " "): "number" for phase in PHASES}
    columns = {"no.": "number", "time": "", "fault": "", "host": "", "rank": "number", "steps": "number"}
    columns |= {"to recover": "number", **phases}
    rows = []
    for number, fault in numbered:
        recovery, seconds = fault.recovery, text.to_recover(fault)
        spent = recovery.phases if recovery else {}
        rows.append(
            [
                str(number),
                text.clock_time(fault.time),
                _e(fault.kind),
                _e(fault.host),
                text.rank(fault.rank),
                "" if fault.steps is None else str(fault.steps),
                seconds if recovery or fault.continued else _badge(seconds, "bad"),
                *(f"{spent[phase]:.2f}" if phase in spent else "" for phase in PHASES),
            ]
        )
    details = [_e(text.one_line(fault.detail)) for _, fault in numbered]
    title = "Faults, with the seconds of each phase of the recovery"
    left_out = len(report.faults) - len(numbered)
    note = f"<p>The last {len(numbered)} of {len(report.faults)}.</p>\n" if left_out else ""
    return note + _table(title, columns, rows, details) + f"<p>{_EXPLAINED}</p>\n"


def _storage(report: Report) -> dict[str, str]:
    storage = report.storage
    newest = f"commit {storage.durable.number}" if storage.durable else "none"
    found = {"durable commits": str(storage.commits), "newest": newest}
    if storage.commits:
        mean = text.duration(storage.seconds / storage.commits)
        found["written"] = (
            f"{storage.bytes / 1e6:,.1f} MB in {text.duration(storage.seconds)}, {mean} a commit"
        )
    found["attempts that failed"] = str(storage.failures)
    if storage.outages:
        found["outages"] = f"{storage.outages}, {text.duration(storage.outage_seconds)} in all"
    if storage.outage is not None:
        since = text.clock_time(storage.outage.since)
        found["no commit became durable"] = f"from {since} on: {storage.outage.error}"
    return found


# -- HTML ----------------------------------------------------------------------------------------------


def _badge(state: str, tone: str) -> str:
    return f'<span class="badge {tone}">{_e(state)}</span>'


def _section(heading: str, body: str) -> str:
    name = heading.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{body}</section>\n'


def _facts(facts: Mapping[str, str]) -> str:
    parts = [f"<dt>{_e(name)}</dt><dd>{_e(value)}</dd>\n" for name, value in facts.items()]
    return f'<dl class="facts">\n{"".join(parts)}</dl>\n'


def _table(
    caption: str, columns: Mapping[str, str], rows: Iterable[Sequence[str]], details: Sequence[str] = ()
) -> str:
    """Return a table.

    Args:
        caption: what it shows.
        columns: name to style: ``number`` or empty.
        rows: cells as HTML.
        details: for each row a text as HTML that stands below it, over the whole width.
    """
    kinds = [f' class="{style}"' if style else "" for style in columns.values()]
    heads = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(columns, kinds, strict=True))
    lines = []
    for row, detail in itertools.zip_longest(rows, details, fillvalue=""):
        cells = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        if detail:
            below = f'<tr class="detail"><td colspan="{len(columns)}">{detail}</td></tr>'
            lines.append(f'<tr class="more">{cells}</tr>\n{below}\n')
        else:
            lines.append(f"<tr>{cells}</tr>\n")
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">\n'
        f"<table>\n<caption>{caption}</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{''.join(lines)}</tbody>\n</table>\n</div>\n"
    )
