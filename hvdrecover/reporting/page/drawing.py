"""A time line laid out as shapes: the job, its ranks, its commits, and the time below them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from hvdrecover.redaction import printable
from hvdrecover.reporting.page import axis, captions
from hvdrecover.reporting.page.shapes import Bar, Drawing, Label, Line, Mark, Name, Shape, Style
from hvdrecover.reporting.timeline import Activity, Commit, Stretch, Strike, Timeline

NARROWEST = 560  # pixels that a time line takes at least; on narrower screens it scrolls
LANES = 200  # ranks that are drawn at most
TICKS = 200  # commits that are drawn at most
_SIZES = ((8, 18, 8), (32, 12, 4), (64, 7, 2), (LANES, 3, 1))  # ranks at most; pixels of a lane, and below it
_ROW = 22  # pixels, of rows that are not ranks
_LABEL_ROWS, _LABEL = 3, 15  # rows of names of faults; pixels of each
_CHARACTER = 6.8  # pixels, of a font of 11
_VISIBLE = 0.2  # percent that a bar takes at least, however short it was
_FINEST = 0.25  # percent; of shorter stretches, several that follow each other are drawn as one
_FEW = 3  # unless they are no more than that: a recovery, and training before and after it
_CROWDED = 1.0  # percent; of faults that are closer to each other in a lane, several are drawn as one
_MATTERING: tuple[Activity, ...] = (
    "recovery",
    "starting",
    "down",
    "training",
)  # of several, the first is shown


def draw(timeline: Timeline) -> Drawing:
    """Lay a time line out."""
    lanes = _chosen(timeline)
    labels, label_rows, right = _fault_labels(timeline)
    rows = _Rows.of(list(lanes), label_rows, bool(timeline.commits))
    ticks = axis.ticks(timeline.length, 7, timeline.begin)
    shapes: list[Shape] = [
        Line("grid", _percent(timeline, time), rows.top - 2, rows.foot) for time, _ in ticks
    ]
    for rank, stretches in lanes.items():
        shapes += _bars(timeline, rank, stretches, rows)
    shapes += _commits(timeline, rows.commits)
    for start in timeline.starts:
        x, title = _percent(timeline, start.time), captions.start(timeline, start)
        shapes += [Line("start", x, rows.job, rows.bottom, title), Mark("start", x, rows.job, 4.5, title)]
    shapes += _faults(timeline, rows, labels)
    times = [Label(text, _percent(timeline, time), rows.foot + 14, False) for time, text in ticks]
    names = _names(timeline, lanes, rows)
    used = {shape.style for shape in shapes}
    return Drawing(
        height=rows.foot + 20,
        left=max((len(name.text) for name in names), default=0) * _CHARACTER + 12,
        right=right,
        shapes=shapes,
        labels=[*labels.values(), *times],
        names=names,
        styles=[style for style in get_args(Style) if style in used and style != "grid"],
        title=captions.title(timeline),
        description=captions.description(timeline),
        left_out=len(timeline.lanes) - len(lanes),
    )


@dataclass(frozen=True)
class _Rows:
    """Pixels from the top: the job's middle, the lanes and their end, the commits, the end of all rows."""

    job: float
    top: float
    lanes: Mapping[int, float]
    height: float
    gap: float
    bottom: float
    commits: float
    foot: float

    @classmethod
    def of(cls, ranks: Sequence[int], label_rows: int, commits: bool) -> _Rows:
        height, gap = next((height, gap) for most, height, gap in _SIZES if len(ranks) <= most)
        job = label_rows * _LABEL + _ROW / 2
        top = job + _ROW / 2 + 2
        lanes = {rank: top + number * (height + gap) for number, rank in enumerate(ranks)}
        bottom = top + len(ranks) * (height + gap)
        foot = bottom + 4 + (_ROW if commits else 0)
        return cls(job, top, lanes, height, gap, bottom, bottom + 4, foot)


def _percent(timeline: Timeline, seconds: float) -> float:
    along = seconds - timeline.begin
    return 100 * min(max(along / timeline.length, 0.0), 1.0) if timeline.length > 0 else 0.0


def _chosen(timeline: Timeline) -> dict[int, Sequence[Stretch]]:
    """The ranks to draw; if there are too many, those that had faults come first."""
    struck = {fault.rank for fault in timeline.faults}
    order = sorted(timeline.lanes, key=lambda rank: (rank not in struck, rank))[:LANES]
    return {rank: timeline.lanes[rank] for rank in sorted(order)}


def _bars(timeline: Timeline, rank: int, stretches: Sequence[Stretch], rows: _Rows) -> list[Bar]:
    bars = []
    for together in _drawn_as_one(timeline, stretches):
        activities = {stretch.activity for stretch in together}
        style = next(activity for activity in _MATTERING if activity in activities)
        begin, end = (_percent(timeline, time) for time in (together[0].begin, together[-1].end))
        width = max(end - begin, _VISIBLE)
        where = min(begin, 100 - width), width, rows.lanes[rank], rows.height
        bars.append(Bar(style, *where, captions.stretches(timeline, rank, together)))
    return sorted(bars, key=lambda bar: bar.style != "training")  # what is short is drawn over what is long


def _drawn_as_one(timeline: Timeline, stretches: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    def short(stretch: Stretch) -> bool:
        return _percent(timeline, stretch.end) - _percent(timeline, stretch.begin) < _FINEST

    for all_short, together in itertools.groupby(stretches, short):
        found = list(together)
        if all_short and len(found) > _FEW:
            yield found
        else:
            yield from ([stretch] for stretch in found)


def _commits(timeline: Timeline, y: float) -> list[Line]:
    bins: dict[int, list[Commit]] = {}
    for commit in timeline.commits:
        place = int(_percent(timeline, commit.time) / 100 * TICKS)
        bins.setdefault(min(place, TICKS - 1), []).append(commit)
    lines = []
    for together in bins.values():
        shown = next((commit for commit in together if commit.durable), together[0])
        style: Style = "durable" if shown.durable else "commit"
        top = y + (2 if shown.durable else 6)
        title = captions.commits(timeline, together)
        lines.append(Line(style, _percent(timeline, shown.time), top, y + _ROW - 6, title))
    return lines


def _faults(timeline: Timeline, rows: _Rows, labels: Mapping[int, Label]) -> list[Shape]:
    """A line for each fault that has a name, and crosses where faults struck."""
    lines: list[Shape] = []
    crowds: dict[float, list[list[Strike]]] = {}
    for fault in timeline.faults:
        x = _percent(timeline, fault.time)
        lane = rows.lanes.get(-1 if fault.rank is None else fault.rank)
        y = rows.job if lane is None else lane + rows.height / 2
        there = crowds.setdefault(y, [])
        alone = not there or x - _percent(timeline, there[-1][0].time) >= _CROWDED
        if alone:
            there.append([])
        there[-1].append(fault)
        label = labels.get(fault.number)
        if label or alone:
            head, foot = (label.y - 9 if label else rows.top), (rows.bottom if lane is None else y)
            title = captions.faults(timeline, [fault])
            lines.append(Line("fault", x, min(head, y), foot, title))
    size = max(min(rows.height / 4, 4.5), 2.5)
    return lines + [
        Mark("fault", _percent(timeline, crowd[0].time), y, size, captions.faults(timeline, crowd))
        for y, there in crowds.items()
        for crowd in there
    ]


def _fault_labels(timeline: Timeline) -> tuple[dict[int, Label], int, float]:
    """Names of faults in rows above each other, where there is room.

    The line below a name must cross no other name, so each stands lower than all earlier ones that reach as
    far as it.

    Returns:
        Number of the fault to its label, the number of rows, and the pixels that labels take on the right.
    """
    ends = [0.0] * _LABEL_ROWS  # pixels, on the narrowest screen
    labels: dict[int, Label] = {}
    rows, right = 0, 12.0
    for fault in timeline.faults:
        text = f"{fault.number} {printable(fault.kind)[:24]}"
        x = _percent(timeline, fault.time)
        begin = x / 100 * NARROWEST
        row = max((row + 1 for row, end in enumerate(ends) if end > begin), default=0)
        if row >= _LABEL_ROWS:
            continue
        ends[row] = begin + len(text) * _CHARACTER + 12
        rows, right = max(rows, row + 1), max(right, ends[row] - NARROWEST)
        labels[fault.number] = Label(text, x, (row + 1) * _LABEL - 4, True)
    return labels, rows, right


def _names(timeline: Timeline, lanes: Mapping[int, Sequence[Stretch]], rows: _Rows) -> list[Name]:
    """Names of rows; of ranks with their hosts if there are several, as far as there is room for them."""
    names = []
    if timeline.starts or any(fault.rank not in lanes for fault in timeline.faults):
        names.append(Name("job", rows.job + 4))
    hosts = {rank: lane[-1].host for rank, lane in lanes.items() if lane}
    several = len({stretch.host for lane in lanes.values() for stretch in lane}) > 1
    pitch = rows.height + rows.gap
    for number, rank in enumerate(lanes):
        if number % max(-(-14 // pitch), 1) == 0:
            host = printable(hosts.get(rank, "")) if several else ""
            short = f"{host[:10]}…" if len(host) > 11 else host
            text = f"rank {rank} · {short}" if short else f"rank {rank}"
            names.append(Name(text, rows.lanes[rank] + rows.height / 2 + 4))
    if timeline.commits:
        names.append(Name("commits", rows.commits + _ROW / 2 + 3))
    return names
