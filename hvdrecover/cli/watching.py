"""Following a run that is under way: ``hvdrecover report --watch`` and ``--prometheus``."""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.errors import ConfigError
from hvdrecover.record import Follower
from hvdrecover.redaction import printable

if TYPE_CHECKING:
    from types import ModuleType

    from rich.console import RenderableType

    from hvdrecover.reporting.summary import Commit, Report

_INTERVAL = 1.0  # seconds between two looks at the record
_GRACE = 60.0  # seconds that the supervisor of a finished run may stay silent until it is taken to be lost
_REWRITE = 15.0  # seconds after which a file of metrics is written again, though nothing has changed
_PROGRESS = 30.0  # seconds between two lines that report progress only
_SHOWN = 5  # faults
_LAST_SCRAPE = 60.0  # seconds for which the end of a run is served until Prometheus has asked for it
_LAST_ANSWER = 1.0  # seconds for an answer to get there

_ENDPOINT = re.compile(r"(\[[^\[\]/]+\]|[^:/\[\]]*):(\d+)")

View = Callable[["Report"], None]
"""Shows the state of a run that is followed."""


@dataclass(frozen=True)
class Endpoint:
    """The address at which metrics are served.

    Attributes:
        host: a name or an address; empty for all of this host's addresses.
        port: 0 for a free one.
    """

    host: str
    port: int


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments to those of ``report``."""
    parser.add_argument(
        "--watch",
        action="store_true",
        help="follow the run until it ends; exits with 1 if it ends before it is finished",
    )
    parser.add_argument(
        "--prometheus",
        type=target,
        metavar="FILE|HOST:PORT",
        help="also write metrics to a file, whose name should end in .prom; or with --watch, serve them at "
        "an address such as :9400",
    )


def target(text: str) -> Endpoint | Path:
    """Return the destination of metrics: ``:PORT`` and ``HOST:PORT`` are an endpoint, all else is a file."""
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        return Path(text)
    if int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}': a port is a number up to 65535")
    return Endpoint(match[1].strip("[]"), int(match[2]))


def export(folder: Path, report: Report, where: Endpoint | Path) -> None:
    """Write the metrics of a run once.

    Raises:
        ConfigError: the file cannot be written.
    """
    if isinstance(where, Endpoint):
        raise ConfigError("--prometheus", "an endpoint is there while a run is watched; add --watch")
    MetricsFile(folder, where)(report)


def run(folder: Path, arguments: argparse.Namespace) -> int:
    """Follow a run until it ends; returns the exit code: 0 if it was finished, else 1.

    Raises:
        ConfigError: the arguments exclude each other, or the metrics cannot be written or served.
    """
    if arguments.json or arguments.html:
        raise ConfigError("--watch", "it makes no document; ask for --json or --html without it")
    where: Endpoint | Path | None = arguments.prometheus
    with ExitStack() as stack:
        shown: list[View] = []
        if isinstance(where, Endpoint):
            shown.append(stack.enter_context(endpoint(folder, where.host, where.port)))
        elif where is not None:
            shown.append(MetricsFile(folder, where))
        shown.append(stack.enter_context(terminal(folder)))
        report = follow(Follower(folder), shown)
    return 0 if report.ending.outcome == "finished" else 1


def follow(follower: Follower, views: Sequence[View], clock: Clock = SYSTEM_CLOCK) -> Report:
    """Show the state of a run, again and again, until it ends; return the last report."""
    from hvdrecover.reporting.summary import Run

    run, never, begun = Run(), threading.Event(), False
    changed = clock.monotonic()
    while True:
        for event in follower.look():
            run.take(event)
            changed, begun = clock.monotonic(), True
        if begun:
            report = run.report()
            for view in views:
                view(report)
            silent = clock.monotonic() - changed
            if report.over or (report.ending.outcome == "finished" and silent > _GRACE):
                return report
        clock.wait(never, _INTERVAL)


# -- views ---------------------------------------------------------------------------------------------


class Lines:
    """A line on stdout when something changes; for a stdout that is not a terminal."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._before: Report | None = None
        self._shown: tuple[float, Commit | None] = 0.0, None  # when, and how far the run had got

    def __call__(self, report: Report) -> None:
        """Write the changes, and from time to time the progress."""
        from hvdrecover.reporting import text

        now = self._clock.now()
        if self._before is None:
            lines = [f"{name}: {fact}" for name, fact in text.status(report, now).items() if fact]
        else:
            lines = text.changes(self._before, report)
            shown, commit = self._shown
            if report.commit != commit and (lines or report.over or now - shown >= _PROGRESS):
                lines.append(text.progress(report))
        if lines:
            self._shown = now, report.commit
            moment = text.clock_time(now)
            sys.stdout.writelines(f"{moment} {printable(line)}\n" for line in lines)
            sys.stdout.flush()
        self._before = report


def frame(folder: Path, report: Report, now: float) -> RenderableType:
    """Return the view of a run for a terminal."""
    from rich.console import Group

    from hvdrecover.cli.printer import faults, pairs, section
    from hvdrecover.reporting import text

    facts = pairs({"run": str(folder), **text.status(report, now)})
    if not report.faults:
        return facts
    return Group(facts, section("the last faults", faults(report.faults[-_SHOWN:])))


@contextmanager
def terminal(folder: Path) -> Iterator[View]:
    """Yield a view that is drawn again at each look; or lines, if stdout is not a terminal."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    from rich.live import Live as Display

    from hvdrecover.cli.printer import Harmless, console_for, plain

    waiting = plain(f"reading the record in {folder}, or waiting for the first event …")
    with Display(waiting, console=console_for(sys.stdout), auto_refresh=False) as display:
        display.refresh()
        yield lambda report: display.update(Harmless(frame(folder, report, SYSTEM_CLOCK.now())), refresh=True)


class MetricsFile:
    """A file of metrics. It is written when something changes, and regularly to show that it is up to date.

    Args:
        folder: folder of the run.
        file: the file.
    """

    def __init__(self, folder: Path, file: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        # Without a clock: an age in a file is wrong as soon as nothing writes the file.
        self._exporter = _prometheus().Exporter(str(folder), clock=None)
        self._file = file
        self._clock = clock
        self._written: float | None = None
        self._shown: Report | None = None
        self._failed = False

    def __call__(self, report: Report) -> None:
        """Write the file.

        Raises:
            ConfigError: it cannot be written the first time. Later, that is a line on stderr and a retry.
        """
        now = self._clock.monotonic()
        fresh = self._written is not None and now - self._written < _REWRITE
        if fresh and report == self._shown:
            return
        self._exporter.update(report)
        try:
            _prometheus().write(self._exporter, self._file)
        except ConfigError as error:
            if self._written is None:
                raise
            if not self._failed:
                sys.stderr.write(f"hvdrecover: {error}; trying again\n")
            self._failed = True
            return
        self._written, self._shown, self._failed = now, report, False


@contextmanager
def endpoint(folder: Path, host: str, port: int) -> Iterator[View]:
    """Serve the metrics over HTTP, until the end of the run is scraped; a line on stderr tells the port.

    Raises:
        ConfigError: the address is not available.
    """
    prometheus = _prometheus()
    exporter = prometheus.Exporter(str(folder))
    with prometheus.serving(exporter, host, port) as taken:
        sys.stderr.write(f"hvdrecover: metrics are served at {host}:{taken}\n")
        yield exporter.update
        exporter.wait_until_seen(_LAST_SCRAPE)
        SYSTEM_CLOCK.wait(threading.Event(), _LAST_ANSWER)


def _prometheus() -> ModuleType:
    try:
        from hvdrecover.reporting import prometheus
    except ImportError as error:
        problem = f"prometheus_client cannot be imported ({error}); pip install 'hvdrecover[prometheus]'"
        raise ConfigError("--prometheus", problem) from error
    return prometheus
