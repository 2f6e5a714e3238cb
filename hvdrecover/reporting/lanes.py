"""A time line for a terminal: a line for each rank, told apart without colours, too."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from hvdrecover.reporting import words
from hvdrecover.reporting.timeline import Activity, Stretch, Timeline

_INK: dict[Activity, tuple[str, str]] = {  # of several in one character, the first is shown
    "recovery": ("▓", "dark_orange"),
    "starting": ("░", "bright_black"),
    "training": ("█", "steel_blue"),
    "down": (" ", ""),
}
_LEAST = 10  # characters


def draw(timeline: Timeline, width: int) -> Text:
    """Draw what each rank was doing, and the numbers of faults above it.

    Args:
        timeline: the run; for a few ranks.
        width: in characters, of the whole.
    """
    names = {rank: f"rank {rank}" for rank in timeline.lanes}
    left = max(map(len, [*names.values(), "faults"])) + 1
    columns = max(width - left, _LEAST)
    text = Text("faults".ljust(left), no_wrap=True)
    text.append(_faults(timeline, columns), style="bold red")
    for rank, lane in timeline.lanes.items():
        text.append("\n" + names[rank].ljust(left))
        for activity in _sampled(timeline, lane, columns):
            text.append(*_INK[activity])
    end = words.duration(timeline.length)
    text.append(f"\n{'':{left}}0{end.rjust(columns - 1)}\n{'':{left}}")
    for activity, (character, style) in _INK.items():
        if activity != "down":
            text.append(character, style)
            text.append(f" {activity}   ")
    return text


def _sampled(timeline: Timeline, lane: Sequence[Stretch], columns: int) -> list[Activity]:
    """The activity of each character."""
    length = timeline.length / columns
    found: list[Activity] = []
    for column in range(columns):
        begin, end = column * length, (column + 1) * length
        there = {each.activity for each in lane if each.begin < end and each.end > begin}
        found.append(next((activity for activity in _INK if activity in there), "down"))
    return found


def _faults(timeline: Timeline, columns: int) -> str:
    line = [" "] * columns
    for fault in timeline.faults:
        mark = str(fault.number)
        place = int(fault.time / timeline.length * columns) if timeline.length else 0
        place = max(min(place, columns - len(mark)), 0)
        line[place : place + len(mark)] = mark
    return "".join(line)
