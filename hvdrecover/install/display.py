"""The progress of a long installation: a bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

_INTERVAL = 20.0  # the least time between two lines about one step's progress, in seconds
_POINTS = 10  # the least progress between them, in percentage points
_PATIENCE = 60.0  # the time after which a line is due without that progress, in seconds
_PERCENT = re.compile(r"\[ *(\d{1,3})%\] ")


def percent_of(line: str) -> int | None:
    """Return the percentage that a line of CMake's makefiles begins with, such as ``[ 45%] Building``."""
    match = _PERCENT.match(line)
    return int(match[1]) if match else None


class Progress(Protocol):
    """Shows the steps of an installation."""

    def step(self, title: str) -> None:
        """Say that a step begins; the step before it is done."""

    def watch(self, line: str) -> None:
        """Take in one line of what a command prints."""

    def finish(self) -> None:
        """Say that the last step is done."""


class PlainProgress:
    """Writes one line when a step begins, one when it is done, and now and then one in between.

    Args:
        write: takes a line without its end.
        clock: the time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._title = ""
        self._began = self._said = 0.0
        self._percent = self._shown = 0

    def step(self, title: str) -> None:
        """Say that a step begins."""
        self.finish()
        self._title = title
        self._percent = self._shown = 0
        self._began = self._said = self._clock()
        self._write(f"{title} ...")

    def watch(self, line: str) -> None:
        """Write a line when enough time and progress have gone by, or a lot of time."""
        found, now = percent_of(line), self._clock()
        self._percent = self._percent if found is None else found
        quiet, progress = now - self._said, self._percent - self._shown
        if (quiet >= _INTERVAL and progress >= _POINTS) or quiet >= _PATIENCE:
            self._said, self._shown = now, self._percent
            self._write(f"{self._title}: {self._percent} % after {now - self._began:.0f} s")

    def finish(self) -> None:
        """Say how long the step took."""
        if self._title:
            self._write(f"{self._title}: done in {self._clock() - self._began:.1f} s")
        self._title = ""


class BarProgress:
    """Draws one line per step on a terminal, with a bar where the percentage is known."""

    def __init__(self, bar: RichBar) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def step(self, title: str) -> None:
        """Add a line for the step."""
        self.finish()
        self._task = self._bar.add_task(title, total=None)

    def watch(self, line: str) -> None:
        """Move the bar."""
        percent = percent_of(line)
        if percent is not None and self._task is not None:
            self._bar.update(self._task, total=100, completed=percent)

    def finish(self) -> None:
        """Fill the bar."""
        if self._task is not None:
            self._bar.update(self._task, total=100, completed=100)


@contextmanager
def show_progress(stream: TextIO) -> Iterator[Progress]:
    """Show progress on a stream, in the way that suits it."""
    if not stream.isatty():

        def write(line: str) -> None:
            stream.write(line + "\n")
            stream.flush()

        yield PlainProgress(write)
        return
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichBar

    title = (SpinnerColumn(finished_text="✓"), TextColumn("{task.description}"))
    state = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with RichBar(*title, *state, console=Console(file=stream)) as bar:
        yield BarProgress(bar)
