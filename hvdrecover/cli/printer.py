"""The output of all commands: a document as JSON, or parts of text for people."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as Speed
from rich.table import Table
from rich.text import Text

from hvdrecover.texts import printable

SCHEMA = 1  # of the JSON documents; it changes if a key goes or changes its meaning
_WIDE = 100_000  # columns: a line is not broken unless it goes to a terminal


def put(document: Any, text: Iterable[RenderableType], *, as_json: bool) -> None:
    """Write the result of a command to stdout: a mapping or dataclass for programs, or text for people."""
    if as_json:
        sys.stdout.write(json_text(document))
    else:
        put_text(text)


def json_text(document: Any) -> str:
    return json.dumps({"schema": SCHEMA, **_jsonable(document)}, indent=1) + "\n"


def put_text(parts: Iterable[RenderableType], stream: TextIO | None = None) -> None:
    stream = stream or sys.stdout
    console = console_for(stream)
    output = Group(*(plain(part) if isinstance(part, str) else part for part in parts))
    if stream.isatty():
        console.print(output)
        return
    with console.capture() as capture:
        console.print(output)
    stream.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


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


# -- parts of text -------------------------------------------------------------------------------------
# Other users may have written a commit or a record, so every text passes through `plain`.


def plain(text: str, style: str = "") -> Text:
    """Return a text that rich and the terminal take literally."""
    return Text(printable(text, "\n"), style)


def table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table without lines; a column whose title ends with ``>`` is aligned to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for title in columns:
        justify: Any = "right" if title.endswith(">") else "left"
        made.add_column(title.rstrip(">"), justify=justify, overflow="fold")
    for row in rows:
        made.add_row(*map(plain, row))
    return made


def pairs(facts: Mapping[str, str]) -> Table:
    return table(("", ""), facts.items())


def section(title: str, *body: RenderableType) -> RenderableType:
    return Group(Text(), plain(title, "bold"), Padding.indent(Group(*body), 2))


# -- the terminal --------------------------------------------------------------------------------------


def console_for(stream: TextIO) -> Console:
    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr until the end of the block; yields a function that takes further bytes."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=total)
        yield lambda count: shown.advance(task, count)
