"""Following a run that is under way: ``hvdrecover report --watch``, and ``--prometheus``."""

from __future__ import annotations

import argparse
import re
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.cli.views import View
    from hvdrecover.reporting.following import Follower
    from hvdrecover.reporting.live import Live
    from hvdrecover.reporting.status import Status

_INTERVAL = 1.0  # seconds between two looks at the files
_GRACE = 60.0  # seconds that the supervisor of a finished run may stay silent until it is taken to be lost

_ENDPOINT = re.compile(r"(\[[^\[\]/]+\]|[^:/\[\]]*):(\d+)")


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
    """Return where metrics go: ``:PORT`` and ``HOST:PORT`` are an endpoint, all else is a file."""
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        return Path(text)
    if int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}': a port is a number up to 65535")
    return Endpoint(match[1].strip("[]"), int(match[2]))


def export(folder: Path, where: Endpoint | Path) -> None:
    """Write the metrics of a run once.

    Raises:
        ConfigError: there are no events, or the file can't be written.
    """
    from hvdrecover.cli import views

    if isinstance(where, Endpoint):
        raise ConfigError("--prometheus", "an endpoint is there while a run is watched; add --watch")
    views.MetricsFile(folder, where).show(look(folder), "")


def look(folder: Path) -> Status:
    """The status of a run now.

    Raises:
        ConfigError: there are no events, or they can't be read.
    """
    from hvdrecover.reporting.following import Follower
    from hvdrecover.reporting.live import Live

    follower, live = Follower(folder), Live()
    _catch_up(follower, live)
    status = live.status()
    if status is None or follower.problem:
        problem = follower.problem or "it holds no events"
        raise ConfigError("FOLDER", f"'{folder}' could not be read: {problem}")
    return status


def run(folder: Path, arguments: argparse.Namespace) -> int:
    """Follow a run until it ends; returns the exit code: 0 if it was finished, else 1.

    Raises:
        ConfigError: the arguments don't go together, or the metrics can't be written or served.
    """
    from hvdrecover.cli import views
    from hvdrecover.reporting.following import Follower
    from hvdrecover.reporting.live import Live

    if arguments.json or arguments.html:
        raise ConfigError("--watch", "it makes no document; ask for --json or --html without it")
    where: Endpoint | Path | None = arguments.prometheus
    with ExitStack() as stack:
        shown: list[View] = []
        if isinstance(where, Endpoint):
            shown.append(stack.enter_context(views.endpoint(folder, where.host, where.port)))
        elif where is not None:
            shown.append(views.MetricsFile(folder, where))
        shown.append(stack.enter_context(views.terminal(folder)))
        status = follow(Follower(folder), Live(), shown)
    return 0 if status.ending.outcome == "finished" else 1


def follow(follower: Follower, live: Live, views: Sequence[View], clock: Clock = SYSTEM_CLOCK) -> Status:
    """Show the status of a run, again and again, until it ends; return the last one."""
    never = threading.Event()
    changed = clock.monotonic()
    while True:
        if _catch_up(follower, live):
            changed = clock.monotonic()
        status = live.status()
        if status is not None:
            for view in views:
                view.show(status, follower.problem)
            silent = clock.monotonic() - changed
            if status.over or (status.ending.outcome == "finished" and silent > _GRACE):
                return status
        clock.wait(never, _INTERVAL)


def _catch_up(follower: Follower, live: Live) -> bool:
    """Read all that there is; returns whether there was anything new."""
    new = False
    while True:
        for file, event in follower.look():
            live.take(file, event)
            new = True
        if not follower.behind:
            return new
