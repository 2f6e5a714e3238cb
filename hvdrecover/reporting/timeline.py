"""The time line of a run as SVG: faults and starts of the job, a lane for each rank, commits, the axis.

Places along the time are percents, so the drawing is as wide as the screen. Places across it are pixels, so
that texts keep their size.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from hvdrecover.redaction import printable
from hvdrecover.reporting import text
from hvdrecover.reporting.history import Activity, Commit, History, Stretch
from hvdrecover.reporting.summary import Fault

LANES = 200  # ranks that are drawn at most
NARROWEST = 560  # pixels that the time takes at least; narrower screens scroll
_LEGEND = {
    "training": "training",
    "recovery": "recovery, from the fault to the first step",
    "starting": "starting",
    "down": "not running",
    "fault": "fault",
    "start": "start of the job",
    "commit": "commit in memory",
    "durable": "durable commit",
}
_HEIGHTS = ((8, 18, 8), (32, 12, 4), (64, 8, 2), (LANES, 3, 1))  # ranks at most; pixels of a lane, of the gap
_ROW = 22  # pixels, of rows that are not ranks
_LABEL_ROWS, _LABEL = 3, 15  # rows of names of faults; pixels of each
_CHARACTER = 6.8  # pixels, of a font of 11
_VISIBLE = 0.2  # percent that a bar takes at least, however short it was
_FINEST = 0.25  # percent; several shorter stretches in a row are drawn as one
_CROWDED = 1.0  # percent; faults of a lane that are closer to each other share one cross
_TICKS = 200  # commits that are drawn at most
_DESCRIBED = 10  # faults that the description names
_MATTERING: tuple[Activity, ...] = (
    "recovery",
    "starting",
    "down",
    "training",
)  # the first there is, is drawn
_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),  # seconds
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200),
    *(86400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)),
)


def draw(history: History) -> str:
    """Return the time line as HTML: names of rows, the drawing, and a legend."""
    return _Drawing(history).html()


def ticks(length: float, most: int = 7) -> list[tuple[float, str]]:
    """Return round times over a length, in seconds, each with its text."""
    step = next((step for step in _STEPS if length / step < most), length)
    times = [place * step for place in range(int(length / step) + 1 if length else 1)]
    return [(time, _axis_text(time, step)) for time in times]


def _axis_text(seconds: float, step: float) -> str:
    if seconds == 0:
        return "0"
    if step < 1:
        return f"{round(seconds, 6):g} s"
    whole, parts = round(seconds), []
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if whole >= length:
            parts.append(f"{whole // length} {unit}")
            whole %= length
    return " ".join(parts)


class _Drawing:
    """Lays a history out, from top to bottom."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._styles: set[str] = set()
        struck = {fault.rank for fault in history.faults}
        order = sorted(history.lanes, key=lambda rank: (rank not in struck, rank))  # if not all can be drawn
        self._lanes = {rank: history.lanes[rank] for rank in sorted(order[:LANES])}
        self._height, gap = next((height, gap) for most, height, gap in _HEIGHTS if len(self._lanes) <= most)
        self._pitch = self._height + gap
        self._labels, label_rows, self._right = self._place_labels()
        self._job = label_rows * _LABEL + _ROW / 2
        self._top = self._job + _ROW / 2 + 2
        self._tops = {rank: self._top + number * self._pitch for number, rank in enumerate(self._lanes)}
        self._bottom = self._top + len(self._lanes) * self._pitch
        self._foot = self._bottom + 4 + (_ROW if history.commits else 0)

    def html(self) -> str:
        axis = ticks(self._history.length)
        shapes = [_line("grid", self._x(time), self._top - 2, self._foot, "") for time, _ in axis]
        for rank, stretches in self._lanes.items():
            shapes += self._bars(rank, stretches)
        shapes += [*self._commits(), *self._starts(), *self._faults()]
        texts = [
            _text("time first" if not time else "time", self._x(time), self._foot + 14, name)
            for time, name in axis
        ]
        texts += [
            _text("fault", self._x(self._since(fault.began)), y, _label(number, fault))
            for number, (fault, y) in self._labels.items()
        ]
        names = list(self._names())
        left = max((len(name) for name, _ in names), default=0) * _CHARACTER + 12
        sides = "".join(f'<text x="{left - 9:g}" y="{y:g}">{_e(name)}</text>' for name, y in names)
        size = f'height="{self._foot + 20:g}"'
        about = f"Time line of {text.counted(len(self._history.lanes), 'rank')} over "
        about += text.duration(self._history.length)
        drawing = (
            f'<svg role="img" width="100%" {size} aria-labelledby="timeline-title timeline-text">'
            f'<title id="timeline-title">{_e(about)}</title>'
            f'<desc id="timeline-text">{_e(self._description())}</desc>{"".join(shapes + texts)}</svg>'
        )
        return (
            '<figure class="timeline"><div class="chart">'
            f'<svg class="names" width="{left - 8:g}" {size} aria-hidden="true">{sides}</svg>'
            f'<div class="scroll" role="region" aria-label="{_e(about)}" tabindex="0"><div class="plot" '
            f'style="padding-right: {self._right:.0f}px; min-width: {NARROWEST}px">{drawing}</div></div>'
            "</div>"
            f"<figcaption>{self._legend()}</figcaption></figure>\n"
        )

    def _since(self, time: float) -> float:
        return time - self._history.origin

    def _x(self, seconds: float) -> float:
        length = self._history.length
        return 100 * min(max(seconds / length, 0.0), 1.0) if length > 0 else 0.0

    def _clock(self, seconds: float) -> str:
        return f"{text.moment(self._history.origin + seconds):%H:%M:%S}"

    # -- shapes ----------------------------------------------------------------------------------------

    def _bars(self, rank: int, stretches: Sequence[Stretch]) -> list[str]:
        bars = []
        for together in self._drawn_as_one(stretches):
            activities = {stretch.activity for stretch in together}
            style = next(activity for activity in _MATTERING if activity in activities)
            begin, end = self._x(together[0].begin), self._x(together[-1].end)
            width = max(end - begin, _VISIBLE)
            self._styles.add(style)
            place = (
                f'x="{min(begin, 100 - width):.3f}%" y="{self._tops[rank]:g}" '
                f'width="{width:.3f}%" height="{self._height}"'
            )
            title = self._of_stretches(rank, together)
            bars.append((style != "training", f'<rect class="{style}" {place}>{_title(title)}</rect>'))
        return [bar for _, bar in sorted(bars, key=lambda bar: bar[0])]  # short bars stand over long ones

    def _drawn_as_one(self, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
        def is_short(stretch: Stretch) -> bool:
            return self._x(stretch.end) - self._x(stretch.begin) < _FINEST

        for short, group in itertools.groupby(stretches, is_short):
            together = list(group)
            if short and len(together) > 3:
                yield together
            else:
                yield from ([stretch] for stretch in together)

    def _of_stretches(self, rank: int, together: Sequence[Stretch]) -> str:
        first, seconds = together[0], text.duration(together[-1].end - together[0].begin)
        if len(together) > 1:
            recoveries = sum(stretch.activity == "recovery" for stretch in together)
            counted = text.counted(recoveries, "recovery", "recoveries")
            return f"rank {rank}: {counted} in {seconds}, from {self._clock(first.begin)}"
        what = {
            "training": f"training for {seconds} after commit {first.commit}, generation {first.generation}",
            "recovery": f"recovery to commit {first.commit} in {seconds}, generation {first.generation}",
            "starting": f"starting for {seconds}",
            "down": f"not running for {seconds}",
        }[first.activity]
        spent = ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in first.phases.items())
        phases = f"; its own phases: {spent}" if spent else ""
        return f"rank {rank} on {first.host}: {what}, from {self._clock(first.begin)}{phases}"

    def _commits(self) -> Iterator[str]:
        bins: dict[int, list[Commit]] = {}
        for commit in self._history.commits:
            bins.setdefault(min(int(self._x(commit.time) / 100 * _TICKS), _TICKS - 1), []).append(commit)
        for together in bins.values():
            durable = sum(commit.durable for commit in together)
            shown = next((commit for commit in together if commit.durable), together[0])
            numbers = sorted(commit.number for commit in together)
            name = f"commit {numbers[0]}" if len(numbers) == 1 else f"commits {numbers[0]} to {numbers[-1]}"
            kept = "durable" if durable == len(together) else f"{durable} of {len(together)} durable"
            title = f"{name}, {kept if durable else 'in memory only'}, generation {shown.generation}"
            style, top = ("durable", self._bottom + 6) if durable else ("commit", self._bottom + 10)
            self._styles.add(style)
            x, foot = self._x(shown.time), self._bottom + _ROW - 2
            yield _line(style, x, top, foot, f"{title}, {self._clock(shown.time)}")

    def _starts(self) -> Iterator[str]:
        for time in self._history.starts:
            self._styles.add("start")
            x, title = self._x(time), f"start of the job, {self._clock(time)}"
            yield _line("start", x, self._job, self._bottom, title)
            yield _mark("start", x, self._job, 4.5, title)

    def _faults(self) -> Iterator[str]:
        """Draw a line for each fault that has a name, and crosses where faults struck."""
        size = max(min(self._height / 4, 4.5), 2.5)
        crowds: list[tuple[float, float, list[str]]] = []
        for number, fault in enumerate(self._history.faults, 1):
            self._styles.add("fault")
            x = self._x(self._since(fault.began))
            top = None if fault.rank is None else self._tops.get(fault.rank)
            y = self._job if top is None else top + self._height / 2
            crowd = next((each for each in crowds if each[1] == y and abs(x - each[0]) < _CROWDED), None)
            if crowd is None:
                crowds.append(crowd := (x, y, []))
            crowd[2].append(self._of_fault(number, fault))
            if number in self._labels:
                head, foot = self._labels[number][1] - 9, self._bottom if top is None else y
                yield _line("fault", x, head, foot, crowd[2][-1])
        for x, y, titles in crowds:
            yield _mark("fault", x, y, size, "; ".join(titles))

    def _of_fault(self, number: int, fault: Fault) -> str:
        who = {None: "the whole job", -1: "a process without a rank"}.get(fault.rank, f"rank {fault.rank}")
        found = (
            f"fault {number}: {fault.kind} of {who} on {fault.host}, {self._clock(self._since(fault.began))}"
        )
        if fault.time - fault.began >= 1.0:
            found += f", noticed {self._clock(self._since(fault.time))}"
        return f"{found}: {text.one_line(fault.detail)}" if fault.detail else found

    # -- texts -----------------------------------------------------------------------------------------

    def _place_labels(self) -> tuple[dict[int, tuple[Fault, float]], int, float]:
        """Place the names of faults in rows above each other, where there is room.

        The line below a name must cross no other name, so each name stands lower than all earlier ones that
        reach as far as it.

        Returns:
            The number of each fault that has a name to the fault and the name's base line, the number of
            rows, and the pixels that names take beyond the end of the time.
        """
        ends = [0.0] * _LABEL_ROWS  # pixels, on the narrowest screen
        labels: dict[int, tuple[Fault, float]] = {}
        rows, right = 0, 12.0
        for number, fault in sorted(enumerate(self._history.faults, 1), key=lambda each: each[1].began):
            begin = self._x(self._since(fault.began)) / 100 * NARROWEST
            row = max((row + 1 for row, end in enumerate(ends) if end > begin), default=0)
            if row < _LABEL_ROWS:
                ends[row] = begin + len(_label(number, fault)) * _CHARACTER + 12
                rows, right = max(rows, row + 1), max(right, ends[row] - NARROWEST)
                labels[number] = fault, (row + 1) * _LABEL - 4
        return labels, rows, right

    def _names(self) -> Iterator[tuple[str, float]]:
        """Yield the names of rows with their base lines; of ranks with hosts, as far as there is room."""
        history = self._history
        if history.starts or any(fault.rank not in self._lanes for fault in history.faults):
            yield "job", self._job + 4
        several = len({stretch.host for lane in self._lanes.values() for stretch in lane}) > 1
        for number, (rank, lane) in enumerate(self._lanes.items()):
            if number % max(-(-14 // self._pitch), 1) == 0:
                host = printable(lane[-1].host) if several and lane else ""
                host = host if host[:1].isdigit() else host.partition(".")[0]  # of an address, all matters
                short = f"{host[:14]}…" if len(host) > 15 else host
                name = f"rank {rank} · {short}" if short else f"rank {rank}"
                yield name, self._tops[rank] + self._height / 2 + 4
        if history.commits:
            yield "commits", self._bottom + _ROW / 2 + 7

    def _description(self) -> str:
        """Return the drawing in words, for people who cannot see it."""
        history = self._history
        durable = sum(commit.durable for commit in history.commits)
        commits = f"{text.counted(len(history.commits), 'commit')} ({durable} durable)"
        faults = text.counted(len(history.faults), "fault")
        parts = [f"{faults}, {commits} and {text.counted(len(history.starts), 'start')} of the job."]
        parts += [f"{self._of_fault(*each)}." for each in enumerate(history.faults[:_DESCRIBED], 1)]
        return " ".join(parts)

    def _legend(self) -> str:
        keys = [
            f'<span class="key">{_KEYS[style]} {name}</span>'
            for style, name in _LEGEND.items()
            if style in self._styles
        ]
        if left_out := len(self._history.lanes) - len(self._lanes):
            keys.append(f'<span class="key">{left_out} more ranks are not drawn</span>')
        return "".join(keys)


def _key(style: str) -> str:
    shapes: Mapping[str, str] = {
        "fault": '<path class="fault" d="M4 2l8 8m0-8l-8 8"/>',
        "start": '<path class="start" d="M4.5 1.5v9l7-4.5z"/>',
        "commit": '<path class="commit" d="M8 4V11"/>',
        "durable": '<path class="durable" d="M8 1V11"/>',
    }
    bar = f'<rect class="{style}" x="0.5" y="1.5" width="15" height="9"/>'
    return f'<svg width="16" height="12" aria-hidden="true">{shapes.get(style, bar)}</svg>'


_KEYS = {style: _key(style) for style in _LEGEND}


def _label(number: int, fault: Fault) -> str:
    return f"{number} {printable(fault.kind)[:24]}"


def _e(text: str) -> str:
    """Return a text without markup: names and errors may come from other users."""
    return escape(printable(text))


def _title(text: str) -> str:
    return f"<title>{_e(text)}</title>" if text else ""


def _line(style: str, x: float, top: float, bottom: float, title: str) -> str:
    place = f'x1="{x:.3f}%" x2="{x:.3f}%" y1="{top:g}" y2="{bottom:g}"'
    return f'<line class="{style}" {place}>{_title(title)}</line>'


def _mark(style: str, x: float, y: float, size: float, title: str) -> str:
    """Draw a cross for a fault, a triangle for a start."""
    s = size
    path = f"M{-s:g} {-s:g}L{s:g} {s:g}M{-s:g} {s:g}L{s:g} {-s:g}"
    if style == "start":
        path = f"M{-s / 2:g} {-s:g}V{s:g}L{s:g} 0Z"
    shape = f'<path class="halo" d="{path}"/><path class="{style}" d="{path}">{_title(title)}</path>'
    return f'<svg class="mark" x="{x:.3f}%" y="{y:g}">{shape}</svg>'


def _text(style: str, x: float, y: float, content: str) -> str:
    # In a nested SVG: CSS moves the text by pixels, from a place in percents.
    return f'<svg x="{x:.3f}%" y="{y:g}"><text class="{style}">{_e(content)}</text></svg>'
