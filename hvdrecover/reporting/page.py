"""The report of a run as one HTML page, which needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Literal

from hvdrecover.errors import ConfigError
from hvdrecover.reporting import summary, text
from hvdrecover.reporting.summary import Fault, Rendezvous, Report, Run, Stint
from hvdrecover.reporting.text import html as _e
from hvdrecover.version import __version__

_OUTCOMES = {"finished": "finished", "ended": "ended early", "open": "no end yet"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_EXPLAINED = (
    "To recover: from the fault until all ranks were stepping again; a hang began when the process fell "
    "silent. The phases, in seconds, are those of the rank that stepped last; start is what passed until it "
    "set out to recover."
)
NARROWEST = 560  # pixels that the time takes at least; narrower screens scroll
_BAR = '<rect class="{}" x="0.5" y="1.5" width="15" height="9"/>'
_LEGEND = "".join(
    f'<span class="key"><svg width="16" height="12" aria-hidden="true">{shape}</svg> {name}</span>'
    for name, shape in {
        "training": _BAR.format("training"),
        "recovery, from the fault to the first step": _BAR.format("recovery"),
        "starting": _BAR.format("starting"),
        "fault": '<path class="fault" d="M4 2l8 8m0-8l-8 8"/>',
        "start of the job": '<path class="start" d="M4.5 1.5v9l7-4.5z"/>',
        "commit in memory": '<path class="commit" d="M8 4V11"/>',
        "durable commit": '<path class="durable" d="M8 1V11"/>',
    }.items()
)
_JOB = 10  # pixels from the top to the row of the job
_ROW = 22  # pixels of a row that is not a rank
_CHARACTER = 6.8  # pixels, of a font of 11
_VISIBLE = 0.2  # percent that a bar takes at least, however short it was
_TICKS = 200  # commits that are drawn at most
_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),  # seconds
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def write(title: str, run: Run, path: Path) -> None:
    try:
        path.write_text(page(title, run), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--html", f"'{path}' cannot be written: {error.strerror}") from error


def page(title: str, run: Run) -> str:
    report = run.report()
    lanes = trace(run, report)
    hosts = {stretch.host for lane in lanes.values() for stretch in lane}
    where = next(iter(hosts)) if len(hosts) == 1 else f"{len(hosts)} hosts"
    until = text.moment(report.end).isoformat(" ", "seconds")
    figures = text.figures(report)
    facts = {name: fact for name, fact in text.facts(report, report.end).items() if name not in figures}
    sections = [("Time line", Drawing(run, report, lanes).html())]
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


# -- what ranks did ------------------------------------------------------------------------------------

# training: from a first step on. recovery: from a fault, or from when ranks set out for a rendezvous, to the
# rank's first step. starting: from the start of the job on.
Activity = Literal["training", "recovery", "starting"]


@dataclass(frozen=True)
class Stretch:
    activity: Activity
    begin: float
    end: float
    host: str
    generation: int  # of the rendezvous that the stretch follows, or leads to
    commit: int  # that was resumed from there
    phases: Mapping[str, float] = field(default_factory=dict)  # of a recovery: this rank's seconds, if known


Lanes = Mapping[int, Sequence[Stretch]]
"""The stretches of each rank, in order of time; they do not overlap."""


def trace(run: Run, report: Report) -> Lanes:
    lanes: dict[int, list[Stretch]] = {
        fault.rank: [] for fault in report.faults if fault.rank is not None and fault.rank >= 0
    }
    # A later attempt is the supervisor's, and part of a recovery; a first one follows a time of nothing.
    starts = [start.time for start in run.starts if (start.whole("attempt") or 1) == 1]

    def add(activity: Activity, begin: float, end: float, rendezvous: Rendezvous, stint: Stint) -> None:
        lane = lanes.setdefault(stint.rank, [])
        if activity != "training":
            for start in [start for start in starts if begin < start <= end][:1]:
                activity, begin = "starting", start
        begin = max(begin, lane[-1].end if lane else report.begin)
        if end > begin:
            spent = summary.phases(stint.recovered) if activity == "recovery" and stint.recovered else {}
            place = rendezvous.generation, rendezvous.commit
            lane.append(Stretch(activity, begin, end, stint.host, *place, spent))

    struck: dict[int, float] = {}  # place of a rendezvous: when the first fault that broke it began
    for fault in run.faults:
        place = run.broken_by(fault)
        struck[place] = min(summary.began(fault), struck.get(place, summary.began(fault)))
    activity: Activity = "starting"
    since, under_way = report.begin, True
    for place, rendezvous in enumerate(run.rendezvouses):
        if not rendezvous.trained():
            under_way = True
            continue
        # When a rendezvous was needed, for a fault or a change of hosts.
        left = [stint.left for stint in rendezvous.stints if stint.left is not None]
        broken = [struck[place]] if place in struck else left
        broken += [each.began for each in run.rendezvouses[place + 1 : place + 2]] if broken else []
        ended = min(broken) if broken else _last_sign(rendezvous)
        for stint in rendezvous.stints:
            stepped = stint.recovered.time if stint.recovered else stint.synced
            add(activity, since, stepped, rendezvous, stint)
            add("training", stepped, ended if stint.finished is None else stint.finished, rendezvous, stint)
        since, activity, under_way = ended, "recovery", bool(broken)
    if run.rendezvouses and under_way and not run.rendezvouses[-1].ends:
        last = run.rendezvouses[-1]
        end = min((it.time for it in run.ends if it.time >= since), default=run.end)
        for stint in last.stints:
            add(activity, since, end, last, stint)
    return dict(sorted(lanes.items()))


def _last_sign(rendezvous: Rendezvous) -> float:
    """Return when ranks of whose end nothing is known did something for the last time."""
    steps = [step.time for step in rendezvous.first_steps]
    return max([rendezvous.agreed, *rendezvous.times[-1:], *steps, *rendezvous.ends])


# -- the drawing ---------------------------------------------------------------------------------------


def ticks(length: float, most: int = 7) -> list[tuple[float, str]]:
    """Return round times over a length, in seconds, each with its text."""
    step = next((step for step in _STEPS if length / step < most), length)
    seconds, unit = next((each for each in _UNITS if each[0] <= step), _UNITS[-1])
    times = [place * step for place in range(int(length / step) + 1 if length else 1)]
    return [(time, f"{round(time / seconds, 6):g} {unit}" if time else "0") for time in times]


# Places along the time are percents, so the drawing is as wide as the screen. Places across it are pixels,
# so that texts keep their size.
class Drawing:
    def __init__(self, run: Run, report: Report, lanes: Lanes) -> None:
        self._run, self._report = run, report
        self._length = report.end - report.begin
        self._lanes = lanes
        self._height = min(max(512 // max(len(self._lanes), 1), 3), 18)  # pixels of a lane
        self._pitch = self._height + max(self._height // 3, 1)
        top = _JOB + _ROW / 2 + 2
        self._tops = {rank: top + number * self._pitch for number, rank in enumerate(self._lanes)}
        self._bottom = top + len(self._lanes) * self._pitch
        self._foot = self._bottom + 4 + (_ROW if report.commits else 0)

    def html(self) -> str:
        shapes = [*self._bars(), *self._commits(), *self._starts(), *self._faults()]
        grid = []
        for time, name in ticks(self._length):
            x, style = self._x(self._report.begin + time), "time" if time else "time first"
            grid.append(_line("grid", x, _JOB + _ROW / 2, self._foot, ""))
            # In a nested SVG: CSS moves the text by pixels, from a place in percents.
            name = f'<text class="{style}">{_e(name)}</text>'
            shapes.append(f'<svg x="{x:.3f}%" y="{self._foot + 14:g}">{name}</svg>')
        names = list(self._names())
        left = max(len(name) for name, _ in names) * _CHARACTER + 12
        sides = "".join(f'<text x="{left - 9:g}" y="{y:g}">{_e(name)}</text>' for name, y in names)
        size = f'height="{self._foot + 20:g}"'
        ranks = text.counted(len(self._lanes), "rank")
        about = _e(f"Time line of {ranks} over {text.duration(self._length)}")
        return (
            '<figure class="timeline"><div class="chart">'
            f'<svg class="names" width="{left - 8:g}" {size} aria-hidden="true">{sides}</svg>'
            f'<div class="scroll" role="region" aria-label="{about}" tabindex="0">'
            f'<div class="plot" style="min-width: {NARROWEST}px">'
            f'<svg role="img" width="100%" {size} aria-label="{about}">{"".join(grid + shapes)}</svg>'
            "</div></div></div>"
            f"<figcaption>{_LEGEND}</figcaption></figure>\n"
        )

    def _x(self, time: float) -> float:
        return 100 * min(max((time - self._report.begin) / self._length, 0.0), 1.0) if self._length else 0.0

    def _bars(self) -> list[str]:
        bars = []
        for rank, lane in self._lanes.items():
            for each in lane:
                begin, end = self._x(each.begin), self._x(each.end)
                width = max(end - begin, _VISIBLE)
                place = f'x="{min(begin, 100 - width):.3f}%" y="{self._tops[rank]:g}" width="{width:.3f}%"'
                title = _title(f"rank {rank} on {each.host}: {_of_stretch(each)}")
                bar = f'<rect class="{each.activity}" {place} height="{self._height}">{title}</rect>'
                bars.append((each.activity != "training", bar))
        return [bar for _, bar in sorted(bars, key=lambda bar: bar[0])]  # short bars stand over long ones

    def _commits(self) -> Iterator[str]:
        by_place: dict[int, list[tuple[float, int, bool]]] = {}
        for each in self._run.rendezvouses:
            for number, time in zip(each.numbers, each.times, strict=True):
                place = int(self._x(time) * _TICKS / 101)
                by_place.setdefault(place, []).append((time, number, number in each.durable))
        for together in by_place.values():
            durable = [commit for commit in together if commit[2]]
            time, numbers = (durable or together)[0][0], sorted(number for _, number, _ in together)
            name = f"commit {numbers[0]}" if len(numbers) == 1 else f"commits {numbers[0]} to {numbers[-1]}"
            kept = f"{len(durable)} durable" if durable else "in memory only"
            style, top = ("durable", 6) if durable else ("commit", 10)
            title = f"{name}, {kept}, {text.clock_time(time)}"
            yield _line(style, self._x(time), self._bottom + top, self._bottom + _ROW - 2, title)

    def _starts(self) -> Iterator[str]:
        for start in self._run.starts:
            x, title = self._x(start.time), f"start of the job, {text.clock_time(start.time)}"
            yield _line("start", x, _JOB, self._bottom, title)
            yield _mark("start", x, _JOB, "M-2.25 -4.5V4.5L4.5 0Z", title)

    def _faults(self) -> Iterator[str]:
        size = max(min(self._height / 4, 4.5), 2.5)
        cross = f"M{-size:g} {-size:g}L{size:g} {size:g}M{-size:g} {size:g}L{size:g} {-size:g}"
        for number, fault in enumerate(self._report.faults, 1):
            top = None if fault.rank is None else self._tops.get(fault.rank)
            y = _JOB if top is None else top + self._height / 2
            yield _mark("fault", self._x(fault.began), y, cross, _of_fault(number, fault))

    def _names(self) -> Iterator[tuple[str, float]]:
        """Yield the names of rows with their base lines, as far as there is room; of ranks with hosts."""
        yield "job", _JOB + 4
        several = len({stretch.host for lane in self._lanes.values() for stretch in lane}) > 1
        for rank, lane in list(self._lanes.items())[:: -(-14 // self._pitch)]:
            host = f" · {lane[-1].host[:15]}" if several and lane else ""
            yield f"rank {rank}{host}", self._tops[rank] + self._height / 2 + 4
        if self._report.commits:
            yield "commits", self._bottom + _ROW / 2 + 7


def _of_stretch(stretch: Stretch) -> str:
    seconds, place = text.duration(stretch.end - stretch.begin), f"generation {stretch.generation}"
    what = {
        "training": f"training for {seconds} after commit {stretch.commit}, {place}",
        "recovery": f"recovery to commit {stretch.commit} in {seconds}, {place}",
        "starting": f"starting for {seconds}",
    }[stretch.activity]
    spent = ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in stretch.phases.items())
    return f"{what}, from {text.clock_time(stretch.begin)}" + (f"; its own phases: {spent}" if spent else "")


def _of_fault(number: int, fault: Fault) -> str:
    who = {None: "the whole job", -1: "a process without a rank"}.get(fault.rank, f"rank {fault.rank}")
    found = f"fault {number}: {fault.kind} of {who} on {fault.host}, {text.clock_time(fault.began)}"
    if fault.time - fault.began >= 1.0:
        found += f", noticed {text.clock_time(fault.time)}"
    return f"{found}: {text.one_line(fault.detail)}" if fault.detail else found


def _title(text: str) -> str:
    return f"<title>{_e(text)}</title>" if text else ""


def _line(style: str, x: float, top: float, bottom: float, title: str) -> str:
    place = f'x1="{x:.3f}%" x2="{x:.3f}%" y1="{top:g}" y2="{bottom:g}"'
    return f'<line class="{style}" {place}>{_title(title)}</line>'


def _mark(style: str, x: float, y: float, path: str, title: str) -> str:
    shape = f'<path class="halo" d="{path}"/><path class="{style}" d="{path}">{_title(title)}</path>'
    return f'<svg class="mark" x="{x:.3f}%" y="{y:g}">{shape}</svg>'
