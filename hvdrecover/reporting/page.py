"""The report of a run as one HTML page, which needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from hvdrecover.errors import ConfigError
from hvdrecover.reporting import text, timeline
from hvdrecover.reporting.summary import Report, Run
from hvdrecover.reporting.text import html as _e
from hvdrecover.version import __version__

_OUTCOMES = {"finished": "finished", "ended": "ended early", "open": "no end yet"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_EXPLAINED = (
    "To recover: from the fault until all ranks were stepping again; a hang began when the process fell "
    "silent. The phases, in seconds, are those of the rank that stepped last; start is what passed until it "
    "set out to recover."
)


def write(title: str, run: Run, path: Path) -> None:
    try:
        path.write_text(page(title, run), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--html", f"'{path}' cannot be written: {error.strerror}") from error


def page(title: str, run: Run) -> str:
    report = run.report()
    lanes = timeline.trace(run, report)
    hosts = {stretch.host for lane in lanes.values() for stretch in lane}
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    until = text.moment(report.end).isoformat(" ", "seconds")
    figures = text.figures(report)
    facts = {name: fact for name, fact in text.facts(report, report.end).items() if name not in figures}
    sections = [("Time line", timeline.draw(run, report, lanes))]
    if report.faults:
        rows = [text.tally_row(kind, tally) for kind, tally in report.kinds.items()]
        recoveries = _table("Time to recover from each kind of fault", text.TALLY, rows)
        sections.append(("Time to recover", recoveries))
    sections.append(("Faults", _faults(report)))
    sections.append(("The run", _list("facts", ((name, _e(fact)) for name, fact in facts.items()))))
    shown = [(name, f"{_e(value)}<small>{_e(note)}</small>") for name, (value, note) in figures.items()]
    badge = f'<span class="badge {report.outcome}">{_OUTCOMES[report.outcome]}</span>'
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
<p class="kicker">hvdrecover report {badge}</p>
<h1>{_e(title)}</h1>
<p class="about">{_e(f"{text.counted(len(lanes), 'rank')} on {where}, until {until}")}</p>
</header>
<main>
{_list("figures", shown)}{"".join(_section(*each) for each in sections)}</main>
<footer><p>hvdrecover {__version__}</p></footer>
</body>
</html>
"""


def _faults(report: Report) -> str:
    if not report.faults:
        return "<p>There were none.</p>\n"
    rows = [[str(number), *text.fault_row(fault)] for number, fault in enumerate(report.faults, 1)]
    details = [text.one_line(fault.detail) for fault in report.faults]
    table = _table("Faults, with the seconds of each phase", ("no.>", *text.FAULT), rows, details)
    return f"{table}<p>{_EXPLAINED}</p>\n"


# -- HTML ----------------------------------------------------------------------------------------------


def _section(heading: str, body: str) -> str:
    name = heading.lower().replace(" ", "-")
    return f'<section aria-labelledby="{name}">\n<h2 id="{name}">{heading}</h2>\n{body}</section>\n'


def _list(style: str, facts: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and values, which are HTML."""
    parts = [f"<div><dt>{_e(name)}</dt><dd>{value}</dd></div>\n" for name, value in facts]
    return f'<dl class="{style}">\n{"".join(parts)}</dl>\n'


def _table(
    caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]], details: Sequence[str] = ()
) -> str:
    """Return a table; the detail of a row stands below it, over the whole width."""
    kinds = [' class="number"' if name.endswith(">") else "" for name in columns]
    names = [name.rstrip(">") for name in columns]
    heads = "".join(f'<th scope="col"{kind}>{name}</th>' for name, kind in zip(names, kinds, strict=True))
    lines = []
    for row, detail in zip(rows, details or [""] * len(rows), strict=True):
        cells = "".join(f"<td{kind}>{_e(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        lines.append(f"<tr{' class=more' if detail else ''}>{cells}</tr>\n")
        if detail:
            lines.append(f'<tr class="detail"><td colspan="{len(columns)}">{_e(detail)}</td></tr>\n')
    return (
        f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">\n'
        f"<table>\n<caption>{caption}</caption>\n<thead><tr>{heads}</tr></thead>\n"
        f"<tbody>\n{''.join(lines)}</tbody>\n</table>\n</div>\n"
    )
