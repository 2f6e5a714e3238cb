"""The table, for the terminal and for the page."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rows import Fact, Row

_START, _END = "<!-- benchmarks/run writes from here -->", "<!-- to here -->"
_HEADINGS = ("what", "state", "hvdrecover", "peer", "peer's", "value", "bar", "stretch", "")
_COLOURS = {"stretch met": "green", "bar met": "yellow", "missed": "red", "": "default"}
PLOT = "performance.png"


def show(rows: Sequence[Row], facts: Sequence[Fact], console: Console) -> None:
    """Print the table and what it depends on."""
    caption = "min / median / max; values are ratios of medians, unless they have a unit"
    table = Table(*_HEADINGS, caption=caption)
    for row in rows:
        table.add_row(*_cells(row), style=_COLOURS[row.verdict])
    console.print(table)
    for fact in facts:
        console.print(f"{fact.what}: {fact.value}")


def write(rows: Sequence[Row], facts: Sequence[Fact], page: Path) -> None:
    """Put the table into a page; see `fill`."""
    picture = f"![Five rows that matter, in seconds, ours beside theirs]({PLOT})"
    fill(page, [*_markdown(rows), "", *listed(facts), "", picture])


def fill(page: Path, lines: Sequence[str]) -> None:
    """Put lines into a page, between its two markers.

    Raises:
        ValueError: the page lacks the markers.
    """
    text = page.read_text()
    section = re.compile(f"{re.escape(_START)}.*{re.escape(_END)}", re.DOTALL)
    if not section.search(text):
        raise ValueError(f"{page} lacks the lines '{_START}' and '{_END}'; put them where the table belongs")
    content = "\n".join([_START, "", *lines, "", _END])
    page.write_text(section.sub(lambda _: content, text))


def amount(row: Row, value: float) -> str:
    """A value or a limit of a row, as people read it."""
    if row.goal is not None and row.goal.slowdown:
        return f"{value:+.1%}"
    shown = f"{value:.{row.goal.digits if row.goal else 2}f}"
    return shown if row.theirs else f"{shown} {row.unit}"


def _cells(row: Row) -> list[str]:
    goal = row.goal
    sign = "≥" if goal is not None and goal.at_least else "≤"
    return [
        row.what,
        row.state,
        _spread(row.ours, row.unit),
        row.peer,
        _spread(row.theirs, row.unit) if row.theirs else "",
        amount(row, row.value),
        f"{sign} {amount(row, goal.bar)}" if goal else "",
        f"{sign} {amount(row, goal.stretch)}" if goal else "",
        row.verdict,
    ]


def _spread(values: Sequence[float], unit: str) -> str:
    """``1.2 / 3.4 / 5.6 s``: the least, the median and the most."""
    three = (min(values), statistics.median(values), max(values))
    return f"{' / '.join(f'{value:.3g}' if value < 1000 else f'{value:.0f}' for value in three)} {unit}"


def _markdown(rows: Sequence[Row]) -> list[str]:
    return markdown([_HEADINGS, *map(_cells, rows)])


def markdown(lines: Sequence[Sequence[str]]) -> list[str]:
    """A table, the first of whose lines are its headings."""
    lines = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return [f"| {' | '.join(line)} |" for line in lines]


def listed(facts: Sequence[Fact]) -> list[str]:
    """A list of facts."""
    return [f"- {fact.what}: {fact.value}" for fact in facts]
