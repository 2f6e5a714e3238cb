"""The elements of a page. All texts are taken as they are: no markup is read in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdrecover.reporting.timeline import Timeline

Tone = Literal["good", "bad", "neutral"]


@dataclass(frozen=True)
class Badge:
    """A short text that says how something stands.

    Attributes:
        text: a word or a few.
        tone: whether that is good.
    """

    text: str
    tone: Tone


@dataclass(frozen=True)
class Figure:
    """A number that a reader should see first.

    Attributes:
        name: what it is.
        value: the number, with its unit.
        note: more about it, smaller.
    """

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Paragraphs:
    """Text.

    Attributes:
        texts: one for each paragraph.
    """

    texts: Sequence[str]


@dataclass(frozen=True)
class Items:
    """A list with bullets.

    Attributes:
        texts: one for each bullet.
    """

    texts: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and what is to be said of them.

    Attributes:
        values: name to text.
    """

    values: Mapping[str, str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading.
        number: whether it holds numbers, which stand at the right.
        text: whether it holds sentences, which go over several lines.
    """

    name: str
    number: bool = False
    text: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows, for those who can't see the heading above it.
        columns: at least one.
        rows: cells, as many in each as there are columns.
        cards: whether each row is a card of its own on narrow screens, for tables with many columns.
    """

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str | Badge]]
    cards: bool = False


@dataclass(frozen=True)
class Badges:
    """Badges in columns, for many at a glance.

    Attributes:
        caption: what they show, for those who can't see their colours.
        badges: in order, down the first column.
    """

    caption: str
    badges: Sequence[Badge]


Block = Badges | Paragraphs | Items | Facts | Table | Timeline


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        heading: its heading.
        blocks: what stands below that, in order.
    """

    heading: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: its heading, and the name of the document.
        about: one line below it.
        state: how it all stands.
        figures: what to see first; may be empty.
        sections: in order.
        command: the command of ``hvdrecover`` that made it.
    """

    title: str
    about: str
    state: Badge
    figures: Sequence[Figure]
    sections: Sequence[Section]
    command: str = "report"
