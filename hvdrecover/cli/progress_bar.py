"""Progress on stderr, if that is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from hvdrecover.redaction import printable


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar that is gone at the end.

    Args:
        what: what is being done.
        total: how many bytes it takes.

    Gives:
        What is told how many more bytes are done.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def checks() -> Iterator[Callable[[str], None]]:
    """A line that says what is being checked, and is gone at the end.

    Gives:
        What is told what is looked at now.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("checking hosts") as status:
        yield lambda what: status.update(Text(f"checking {printable(what)}"))
