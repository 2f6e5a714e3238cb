"""The rows of the table, and what they are held against."""

from __future__ import annotations

import json
import operator
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["measured", "simulated"]
Verdict = Literal["stretch met", "bar met", "missed", ""]
MEMORY = "states"  # the unit of memory that commits hold: multiples of the state's size


@dataclass(frozen=True)
class Goal:
    """The goal that a row must reach."""

    bar: float  # the value that is required
    stretch: float  # the value that is aimed at; the bar, if there is no other
    at_least: bool = False  # whether a larger value is better
    slowdown: bool = False  # whether the value is a ratio less 1, shown in percent
    digits: int = 2  # decimal places to which a value is shown, and judged

    def reached(self, value: float, limit: float) -> bool:
        """Return whether a value is at a limit or on the better side of it."""
        value = round(value, self.digits)
        return value >= limit if self.at_least else value <= limit


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    topic: str  # the module that measured it
    what: str  # what was measured
    state: str  # which state, `1.0 GB` say
    unit: str  # of the measured values
    ours: Sequence[float]  # hvdrecover's values
    peer: str = ""  # what hvdrecover is compared with; empty if the goal is for our own values
    theirs: Sequence[float] = ()  # the peer's values, measured by turns with ours
    goal: Goal | None = None  # what the row must reach; None if it is for information
    # whether values of the same place belong together; what they differ by is then looked at, and what
    # disturbs both does not count
    paired: bool = False

    @property
    def value(self) -> float:
        """The number that the goal is about: the ratio of medians or, without a peer, our median."""
        ours = statistics.median(self.ours)
        if not self.theirs:
            return ours
        theirs = statistics.median(self.theirs)
        if self.paired:
            ours = theirs + statistics.median(map(operator.sub, self.ours, self.theirs))
        ratio = ours / theirs
        return ratio - 1 if self.goal is not None and self.goal.slowdown else ratio

    @property
    def verdict(self) -> Verdict:
        """The part of the goal that has been reached; empty for a row without a goal."""
        if self.goal is None:
            return ""
        if self.goal.reached(self.value, self.goal.stretch):
            return "stretch met"
        return "bar met" if self.goal.reached(self.value, self.goal.bar) else "missed"


@dataclass(frozen=True)
class Fact:
    """Something about the machine that the rows depend on, or that is no figure."""

    what: str
    value: str
    page: str = "performance"  # the page that tells it, among those of the documentation


@dataclass(frozen=True)
class Curve:
    """A figure that depends on a number."""

    chart: str  # the picture that it is drawn in
    what: str  # what the figure is
    unit: str  # of the figure
    along: str  # what the number counts, such as `ranks`
    kind: Kind  # whether all of it is real, or whether what is counted is simulated
    points: Mapping[float, Sequence[float]]  # number to values


Found = Row | Fact | Curve


def broken(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of memory that miss their bar: a promise, which no load of the machine excuses."""
    return [row for row in rows if row.unit == MEMORY and row.verdict == "missed"]


def dump(found: Sequence[Found], path: Path) -> None:
    """Write what a topic found."""
    entries = [{"kind of finding": type(each).__name__, **asdict(each)} for each in found]
    path.write_text(json.dumps(entries))


def load(path: Path) -> list[Found]:
    """Read what a topic found."""
    return [_found(entry.pop("kind of finding"), entry) for entry in json.loads(path.read_text())]


def _found(kind: str, entry: dict[str, Any]) -> Found:
    if kind == "Fact":
        return Fact(**entry)
    if kind == "Curve":
        points = {float(number): values for number, values in entry.pop("points").items()}
        return Curve(**entry, points=points)
    goal = entry.pop("goal")
    return Row(**entry, goal=Goal(**goal) if goal else None)
