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
    """The goal that a row must reach.

    Attributes:
        bar: the value that is required.
        stretch: the value that is aimed at; the bar, if there is no other.
        at_least: whether a larger value is better.
        slowdown: whether the value is a ratio less 1, shown in percent.
        digits: decimal places to which a value is shown, and judged.
    """

    bar: float
    stretch: float
    at_least: bool = False
    slowdown: bool = False
    digits: int = 2

    def reached(self, value: float, limit: float) -> bool:
        """Return whether a value is at a limit or on the better side of it."""
        value = round(value, self.digits)
        return value >= limit if self.at_least else value <= limit


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        topic: the module that measured it.
        what: what was measured.
        state: which state, ``1.0 GB`` say.
        unit: of the measured values.
        ours: hvdrecover's values.
        peer: what hvdrecover is compared with; empty if the goal is for our own values.
        theirs: the peer's values, measured by turns with ours.
        goal: what the row must reach; None if it is for information.
        paired: whether values of the same place belong together; what they differ by is then looked at, and
            what disturbs both does not count.
    """

    topic: str
    what: str
    state: str
    unit: str
    ours: Sequence[float]
    peer: str = ""
    theirs: Sequence[float] = ()
    goal: Goal | None = None
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
    """Something about the machine that the rows depend on, or that is no figure.

    Attributes:
        what: what it is.
        value: how it is.
        page: the page that tells it, among those of the documentation.
    """

    what: str
    value: str
    page: str = "performance"


@dataclass(frozen=True)
class Curve:
    """A figure that depends on a number.

    Attributes:
        chart: the picture that it is drawn in.
        what: what the figure is.
        unit: of the figure.
        along: what the number counts, such as ``ranks``.
        kind: whether all of it is real, or whether what is counted is simulated.
        points: number to values.
    """

    chart: str
    what: str
    unit: str
    along: str
    kind: Kind
    points: Mapping[float, Sequence[float]]


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
