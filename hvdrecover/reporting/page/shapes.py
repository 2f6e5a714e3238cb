"""The shapes that a drawing is made of.

Places along the line of time are percents of its length, so that a drawing is as wide as there is room, and
places across it are pixels from the top, so that texts keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["training", "recovery", "starting", "down", "fault", "start", "commit", "durable", "grid"]

LEGEND: dict[Style, str] = {
    "training": "training",
    "recovery": "recovery, from the fault to the first step",
    "starting": "starting",
    "down": "not running",
    "fault": "fault",
    "start": "start of the job",
    "commit": "commit in memory",
    "durable": "durable commit",
}


@dataclass(frozen=True)
class Bar:
    """A rectangle.

    Attributes:
        style: what it stands for.
        x: percent where it begins.
        width: percent.
        y: its top, in pixels.
        height: pixels.
        title: what is said of it when it is pointed at.
    """

    style: Style
    x: float
    width: float
    y: float
    height: float
    title: str


@dataclass(frozen=True)
class Line:
    """A line across the time.

    Attributes:
        style: what it stands for.
        x: percent.
        top: pixels.
        bottom: pixels.
        title: as of `Bar`.
    """

    style: Style
    x: float
    top: float
    bottom: float
    title: str = ""


@dataclass(frozen=True)
class Mark:
    """A cross for a fault, a triangle for a start.

    Attributes:
        style: ``fault`` or ``start``.
        x: percent of its middle.
        y: pixels of its middle.
        size: half of its height, in pixels.
        title: as of `Bar`.
    """

    style: Style
    x: float
    y: float
    size: float
    title: str


Shape = Bar | Line | Mark


@dataclass(frozen=True)
class Label:
    """A text along the time.

    Attributes:
        text: the text.
        x: percent.
        y: of its base line, in pixels.
        fault: whether it names a fault, beside its line; else it stands below a tick of the axis.
    """

    text: str
    x: float
    y: float
    fault: bool


@dataclass(frozen=True)
class Name:
    """A text left of the time, which says what a row is.

    Attributes:
        text: the text.
        y: of its base line, in pixels.
    """

    text: str
    y: float


@dataclass(frozen=True)
class Drawing:
    """A time line as shapes.

    Attributes:
        height: pixels.
        left: pixels that the names take.
        right: pixels beyond the end of the time that labels may take.
        shapes: in the order in which they are drawn.
        labels: texts along the time.
        names: texts left of it.
        styles: those that occur.
        title: what is drawn.
        description: the same in sentences, for those who can't see it.
        left_out: how many ranks are not drawn.
    """

    height: float
    left: float
    right: float
    shapes: Sequence[Shape]
    labels: Sequence[Label]
    names: Sequence[Name]
    styles: Sequence[Style]
    title: str
    description: str
    left_out: int
