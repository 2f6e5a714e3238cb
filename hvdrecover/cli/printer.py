"""The output of all commands: a result, which is a dataclass, as text for people or as JSON.

In JSON, a result has all fields of its dataclass. In text, it has the fields with an annotation such as
``size: Annotated[int, Fact("size")]``:

- `Fact`: one line ``title  value``; in a row of a table, one column.
- `Rows`: a table with a line for each item, which is a dataclass as well.
- `Block`: a section of text.

Lines of `Result.notes` follow.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Speed
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from hvdrecover.redaction import printable
from hvdrecover.reporting import text as words
from hvdrecover.reporting.summary import Fault

SCHEMA = 1  # of the JSON documents; it changes if a key goes or changes its meaning
_WIDE = 100_000  # columns: a line is not broken unless it goes to a terminal
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_AGES = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))

Shown = str | Text


class Result:
    """Base class of the results of commands."""

    def title(self) -> str:
        """Return the heading of the text; empty for none."""
        return ""

    def notes(self) -> Iterable[Shown]:
        """Return lines for the end of the text."""
        return ()

    def parts(self) -> Iterator[RenderableType]:
        """Yield the parts of the text."""
        facts, sections = _facts(self), list(_sections(self))
        if title := self.title():
            yield Text(printable(title), "bold")
        if facts:
            yield Padding.indent(pairs(facts), 2) if title else pairs(facts)
        yield from sections
        notes = [plain(note) for note in self.notes()]
        if notes and (facts or sections):
            yield Text()
        yield from notes


@dataclass(frozen=True)
class Fact:
    """Annotates a field that is one line, or one column of a table.

    Args:
        title: the line's or the column's title.
        show: makes the value a text.
        right: whether a column is aligned to the right.
        none: the text for None in a column; there is no line for None.
    """

    title: str
    show: Callable[[Any], Shown] = str
    right: bool = False
    none: str = ""


@dataclass(frozen=True)
class Rows:
    """Annotates a field that is a table, if it has items."""

    title: str = ""


@dataclass(frozen=True)
class Block:
    """Annotates a field that is a section, unless its text is empty."""

    title: str
    show: Callable[[Any], str]


def put(result: Result | RenderableType, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Write a result to stdout or another stream, as JSON or as text that fits the terminal."""
    stream = stream or sys.stdout
    if as_json:
        stream.write(dumps(result))
        return
    output = Group(*result.parts()) if isinstance(result, Result) else result
    console = console_for(stream)
    if stream.isatty():
        console.print(Harmless(output))
        return
    with console.capture() as capture:
        console.print(Harmless(output))
    stream.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def dumps(result: Any) -> str:
    """Return a result as a JSON object with the number of its schema."""
    return json.dumps({"schema": SCHEMA, **_jsonable(result)}, indent=1) + "\n"


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _jsonable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity


def _annotated(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the names of the fields that say how to show them, each with its annotation."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for how in getattr(hint, "__metadata__", ()):
            yield name, how


def _facts(result: Any) -> dict[str, Shown]:
    """Return title to text of each `Fact` that has a value."""
    found: dict[str, Shown] = {}
    for name, how in _annotated(type(result)):
        if isinstance(how, Fact) and (value := getattr(result, name)) is not None:
            found[how.title] = how.show(value)
    return found


def _sections(result: Any) -> Iterator[RenderableType]:
    """Yield the tables and blocks of a result."""
    for name, how in _annotated(type(result)):
        value = getattr(result, name)
        if isinstance(how, Rows) and value and isinstance(value[0], Result):
            for item in value:
                yield section(item.title(), Group(*_sections(item)))
        elif isinstance(how, Rows) and value:
            yield section(how.title, table(value)) if how.title else table(value)
        elif isinstance(how, Block) and (text := how.show(value)):
            yield section(how.title, Text(text))


def table(items: Sequence[Any]) -> Table:
    """Return a table with a line for each item and a column for each `Fact`."""
    columns = [(name, how) for name, how in _annotated(type(items[0])) if isinstance(how, Fact)]
    lines = grid(*(how.title + (">" if how.right else "") for _, how in columns))
    for item in items:
        cells = ((how, getattr(item, name)) for name, how in columns)
        lines.add_row(*(plain(how.none if value is None else how.show(value)) for how, value in cells))
    return lines


# -- parts of texts ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Harmless:
    """Output with escaped control characters, since other users may have written it."""

    output: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for each in console.render(self.output, options):
            yield each if each.control else Segment(printable(each.text, "\n"), each.style)


def console_for(stream: TextIO) -> Console:
    """Return the console of stdout or stderr; it takes texts literally."""
    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def plain(*parts: Shown | tuple[str, str]) -> Text:
    """Return a text that rich and the terminal take literally; a tuple is a text and its style."""
    return Text.assemble(*(printable(part, "\n") if isinstance(part, str) else part for part in parts))


def grid(*columns: str) -> Table:
    """Return a table without lines; a column whose title ends with ``>`` is aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.endswith(">") else "left"
        made.add_column(column.rstrip(">"), justify=justify, overflow="fold")
    return made


def pairs(facts: Mapping[str, Shown]) -> Table:
    """Return a table of names and texts."""
    made = grid("", "")
    made.show_header = False
    for name, value in facts.items():
        made.add_row(name, plain(value))
    return made


def section(title: str, body: RenderableType) -> RenderableType:
    """Return a part of a text below a title."""
    return Group(Text(), Text(printable(title), "bold"), Padding.indent(body, 2))


def size(nbytes: float) -> str:
    """Return a number of bytes in decimal units: ``1.3 GB``."""
    value, unit = float(nbytes), 0
    while value >= 999.5 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 or value >= 99.95 else f"{value:.1f} {_UNITS[unit]}"


def age(seconds: float) -> str:
    """Return a duration by its largest unit, ``5 min``. Clocks of hosts differ, so it may be negative."""
    return next((f"{seconds // length:.0f} {unit}" for length, unit in _AGES if seconds >= length), "0 s")


def faults(faults: Sequence[Fault], phases: Sequence[str] = ()) -> Table:
    """Return a table of faults.

    Args:
        faults: the faults.
        phases: the parts of a recovery whose seconds are shown.
    """
    headings = [f"{phase.replace('_', ' ')}>" for phase in phases]
    lines = grid("time", "fault", "host", "rank>", "to recover>", *headings, "detail")
    for each in faults:
        spent = each.recovery.phases if each.recovery else {}
        lines.add_row(
            words.clock_time(each.time),
            plain(each.kind),
            plain(each.host),
            words.rank(each.rank),
            words.to_recover(each),
            *(f"{spent[phase]:.2f}" if phase in spent else "" for phase in phases),
            plain(words.one_line(each.detail)),
        )
    return lines


# -- progress, on a terminal ---------------------------------------------------------------------------


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr until the end of the block; yields a function that takes further bytes."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=total)
        yield lambda count: shown.advance(task, count)


@contextmanager
def checking() -> Iterator[Callable[[str], None]]:
    """Show the present check on stderr until the end of the block; yields a function that takes its topic."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("checking hosts") as status:
        yield lambda what: status.update(Text(f"checking {printable(what)}"))
