"""Views of the status of a run that is being followed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import printable

if TYPE_CHECKING:
    from types import ModuleType

    from rich.console import RenderableType

    from hvdrecover.reporting.status import Commit, Status

_REWRITE = 15.0  # seconds after which a file of metrics is written anew, though nothing has changed
_PROGRESS = 30.0  # seconds between two lines that tell of nothing but progress
_SHOWN = 5  # faults
_LAST_SCRAPE = 60.0  # seconds for which the end of a run is served to somebody who has not asked for it yet
_LAST_ANSWER = 1.0  # seconds for an answer to get there


class View(Protocol):
    """A view of the status of a run."""

    def show(self, status: Status, problem: str) -> None:
        """Show them; ``problem`` tells why some events could not be read, and is empty if all could."""


class Lines:
    """A line on stdout when something changes; for a stdout that is not a terminal."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._before: Status | None = None
        self._shown: tuple[float, Commit | None] = 0.0, None  # when, and how far the run had got
        self._problem = ""

    def show(self, status: Status, problem: str) -> None:
        """Write what has changed, and from time to time how far the run has got."""
        from hvdrecover.reporting import standing

        now = self._clock.now()
        if self._before is None:
            lines = [f"{name}: {text}" for name, text in standing.facts(status, now).items() if text]
        else:
            lines = standing.changes(self._before, status)
            shown, commit = self._shown
            if status.commit != commit and (lines or status.over or now - shown >= _PROGRESS):
                lines.append(standing.progress(status))
        if problem and problem != self._problem:
            lines.append(f"some events could not be read: {problem}")
        if lines:
            self._shown = now, status.commit
            self._write(lines)
        self._before, self._problem = status, problem

    def _write(self, lines: Sequence[str]) -> None:
        from hvdrecover.reporting import words

        moment = words.clock_time(self._clock.now())
        sys.stdout.writelines(f"{moment} {printable(line)}\n" for line in lines)
        sys.stdout.flush()


def frame(folder: Path, status: Status, problem: str, now: float) -> RenderableType:
    """Return what the terminal shows of a run."""
    from rich.console import Group

    from hvdrecover.cli.printer import faults, pairs, plain, section
    from hvdrecover.reporting import standing

    facts = pairs({"run": str(folder), **standing.facts(status, now)})
    if problem:
        facts.add_row("events", plain(f"some could not be read: {problem}"))
    if not status.faults:
        return facts
    return Group(facts, section("the last faults", faults(status.faults[-_SHOWN:])))


@contextmanager
def terminal(folder: Path) -> Iterator[View]:
    """Return what is drawn anew at each look; or lines, if stdout is not a terminal."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    from rich.live import Live as Display

    from hvdrecover.cli.printer import Harmless, console_for, plain

    class Terminal:
        def show(self, status: Status, problem: str) -> None:
            shown = Harmless(frame(folder, status, problem, SYSTEM_CLOCK.now()))
            display.update(shown, refresh=True)

    waiting = plain(f"reading the events of {folder}, or waiting for the first one …")
    with Display(waiting, console=console_for(sys.stdout), auto_refresh=False) as display:
        display.refresh()
        yield Terminal()


class MetricsFile:
    """A file of metrics, written anew when something changes, and at times to show that it is up to date.

    Args:
        folder: of the run.
        file: the file.
    """

    def __init__(self, folder: Path, file: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        # Without a clock, as what it says of the moment is wrong as soon as nobody writes it any more.
        self._exporter = _prometheus().Exporter(str(folder), clock=None)
        self._file = file
        self._clock = clock
        self._written: float | None = None
        self._shown: Status | None = None
        self._failed = False

    def show(self, status: Status, problem: str) -> None:
        """Write the file.

        Raises:
            ConfigError: it can't be written the first time. Later, stderr tells so, and it is tried again.
        """
        now = self._clock.monotonic()
        fresh = self._written is not None and now - self._written < _REWRITE
        if fresh and status == self._shown:
            return
        self._exporter.update(status)
        try:
            _prometheus().write(self._exporter, self._file)
        except ConfigError as error:
            if self._written is None:
                raise
            if not self._failed:
                sys.stderr.write(f"hvdrecover: {error}; trying again\n")
            self._failed = True
            return
        self._written, self._shown, self._failed = now, status, False


@contextmanager
def endpoint(folder: Path, host: str, port: int) -> Iterator[View]:
    """An HTTP endpoint with the metrics, which outlives the run until its end is scraped; stderr tells where.

    Raises:
        ConfigError: the address can't be listened at.
    """
    prometheus = _prometheus()
    exporter = prometheus.Exporter(str(folder))

    class Endpoint:
        def show(self, status: Status, problem: str) -> None:
            exporter.update(status)

    with prometheus.serving(exporter, host, port) as taken:
        sys.stderr.write(f"hvdrecover: metrics are served at {host}:{taken}\n")
        yield Endpoint()
        exporter.wait_until_seen(_LAST_SCRAPE)
        SYSTEM_CLOCK.wait(threading.Event(), _LAST_ANSWER)


def _prometheus() -> ModuleType:
    try:
        from hvdrecover.reporting import prometheus
    except ImportError as error:
        problem = f"its client can't be imported ({error}); pip install 'hvdrecover[prometheus]'"
        raise ConfigError("--prometheus", problem) from error
    return prometheus
