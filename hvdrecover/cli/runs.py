"""The commands ``status``, ``stop`` and ``report``, which look at a run; see ``docs/commands.md``."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import RenderableType
from rich.live import Live
from rich.table import Table

from hvdrecover import config, events
from hvdrecover.cli import options, printer
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.events import Follower
from hvdrecover.launch import presence
from hvdrecover.launch.presence import Supervised
from hvdrecover.machine import SYSTEM_CLOCK, Clock
from hvdrecover.reporting import page, text
from hvdrecover.reporting.summary import PHASES, Report, Run
from hvdrecover.texts import printable

_MARGIN = 60.0  # seconds beyond the grace for a job to end: some processes take long to be killed
_SHOWN = 20  # faults of a report
_WIDE = 120  # columns; narrower terminals have no room for the phases of recoveries
INTERVAL = 1.0  # seconds between two looks at the record
_STEADY = ("state", "storage", "faults", "last fault", "starts", "given up")  # facts that change at events
_PROGRESS = 30.0  # seconds between two lines that report progress only
_LAST_SCRAPE = 60.0  # seconds for which the end of a run is served until Prometheus has asked for it
_LAST_ANSWER = 1.0  # seconds for an answer to get there
_ENDPOINT = re.compile(r"(\[[^\[\]/]+\]|[^:/\[\]]*):(\d+)")

View = Callable[[Report], None]  # shows the state of a run that is followed
Endpoint = tuple[str, int]  # a host, empty for all addresses of this host, and a port, 0 for a free one


def _folder(arguments: argparse.Namespace) -> Path:
    return events.locate(arguments.folder, config.read().events)


# -- status --------------------------------------------------------------------------------------------


def add_status(parser: argparse.ArgumentParser) -> None:
    """Exits with 1 if nothing of the run is running any more."""
    options.add_json(parser)
    options.add_run(parser)


def run_status(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    supervisor, report = presence.find(folder), Run(events.read(folder)).report()
    running = False if report.over else None  # None: only the events can tell, and they have no end
    if supervisor is not None and supervisor.lives is not None:
        running = supervisor.lives
    document = {"folder": folder, "running": running, "supervisor": supervisor, "run": report}
    facts = _status_facts(folder, running, supervisor, report)
    printer.put(document, [printer.pairs(facts)], as_json=arguments.json)
    return 1 if running is False else 0


def _status_facts(
    folder: Path, running: bool | None, supervisor: Supervised | None, report: Report
) -> dict[str, str]:
    known = text.facts(report, SYSTEM_CLOCK.now())
    ranks = str(report.ranks or 0)
    found = {"run": str(folder)}
    if supervisor is not None:
        found["supervisor"] = f"process {supervisor.pid} on {supervisor.host}"
        found["command"] = shlex.join(supervisor.command)
        least = f"; {supervisor.least} suffice" if supervisor.least < supervisor.processes else ""
        ranks = f"{ranks} of {supervisor.processes}{least}"
    if running is False and not report.over:
        known["state"] = "gone: its supervisor has ended without a word; start it again to resume"
    elif running and supervisor is not None and supervisor.leaving:
        known["state"] += "; it leaves at its next commit"
    return {**found, "ranks": ranks, "standbys": f"{report.standbys} ready", **known}


# -- stop ----------------------------------------------------------------------------------------------


def add_stop(parser: argparse.ArgumentParser) -> None:
    """The supervisor of the job gets its stop signal: `hvdrecover run` exits with 75, and resumes there when
    it is started again. Call it on that host. Exits with 1 if the newest commit has not become durable.
    """
    options.add_run(parser)


def run_stop(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if (supervised := presence.find(folder)) is None:
        problem = "no supervisor of this run is known: it has ended, or `hvdrecover run` did not start it"
        raise LaunchError(str(folder), problem)
    presence.ask_to_leave(supervised)
    process = f"process {supervised.pid}"
    sys.stderr.write(f"hvdrecover: the job leaves at its next commit, within {supervised.grace:g} s\n")
    if not presence.wait_for_end(supervised, supervised.grace + _MARGIN):
        raise LaunchError(process, "the supervisor still runs; look at what it says, or kill it")
    report = Run(events.read(folder)).report()
    if report.code is None:  # a supervisor that ends by itself writes how
        killed = "the supervisor was killed before the job had left"
        raise LaunchError(process, f"{killed}; look at what still runs, and start it again")
    newest, durable = (each.number if each else None for each in (report.commit, report.storage.durable))
    kept = f"commit {durable} is durable" if durable is not None else "no commit is durable"
    lost = f", commit {newest} is not" if newest != durable else ""
    sys.stdout.write(f"the job has ended with exit code {report.code}; {kept}{lost}\n")
    return 0 if newest == durable else 1


# -- report --------------------------------------------------------------------------------------------


def add_report(parser: argparse.ArgumentParser) -> None:
    """The record of the run is read, also while the run is under way."""
    options.add_json(parser)
    options.add_run(parser)
    html = "also write a page that holds it all in one file"
    parser.add_argument("--html", metavar="FILE", type=Path, help=html)
    watch = "follow the run until it ends; exits with 1 if it ends before it is finished"
    parser.add_argument("--watch", action="store_true", help=watch)
    metrics = (
        "also write metrics to a file, whose name should end in .prom; or with --watch, serve them at an "
        "address such as :9400"
    )
    parser.add_argument("--prometheus", type=target, metavar="FILE|HOST:PORT", help=metrics)


def target(text: str) -> Endpoint | Path:
    """Return where metrics go: ``:PORT`` and ``HOST:PORT`` are an endpoint, all else is a file."""
    match = _ENDPOINT.fullmatch(text)
    if match is None:
        return Path(text)
    if int(match[2]) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}': a port is a number up to 65535")
    return match[1].strip("[]"), int(match[2])


def run_report(arguments: argparse.Namespace) -> int:
    folder = _folder(arguments)
    if arguments.watch:
        return _watch(folder, arguments)
    run = Run(events.read(folder))
    report = run.report()
    if isinstance(arguments.prometheus, tuple):
        raise ConfigError("--prometheus", "an endpoint is there while a run is watched; add --watch")
    if arguments.prometheus is not None:
        with _metrics(folder, arguments.prometheus) as view:
            view(report)
    if arguments.html is not None:
        page.write(str(folder), run, arguments.html)
    document = {"folder": folder, **vars(report)}
    printer.put(document, _report_text(folder, report), as_json=arguments.json)
    return 0


def _report_text(folder: Path, report: Report) -> Iterator[RenderableType]:
    yield frame(folder, report, SYSTEM_CLOCK.now())
    if not report.faults:
        return
    kinds = [text.tally_row(kind, tally) for kind, tally in report.kinds.items()]
    yield printer.section("time to recover", printer.table(text.TALLY, kinds))
    narrow = sys.stdout.isatty() and printer.console_for(sys.stdout).width < _WIDE
    columns = len(text.FAULT) - (len(PHASES) if narrow else 0)
    rows = [[*text.fault_row(each)[:columns], text.one_line(each.detail)] for each in report.faults[-_SHOWN:]]
    many = len(report.faults) > _SHOWN
    title = f"the last {_SHOWN} faults (--json lists all {len(report.faults)})" if many else "faults"
    faults = printer.table((*text.FAULT[:columns], "detail"), rows)
    yield printer.section(title, faults)


# -- report --watch ------------------------------------------------------------------------------------


def _watch(folder: Path, arguments: argparse.Namespace) -> int:
    if arguments.json or arguments.html:
        raise ConfigError("--watch", "it makes no document; ask for --json or --html without it")
    where: Endpoint | Path | None = arguments.prometheus
    with ExitStack() as stack:
        views = [] if where is None else [stack.enter_context(_metrics(folder, where))]
        views.append(stack.enter_context(_terminal(folder)) if sys.stdout.isatty() else lines())
        report = follow(Follower(folder), views)
    return 0 if report.outcome == "finished" else 1


def follow(follower: Follower, views: Sequence[View], clock: Clock = SYSTEM_CLOCK) -> Report:
    """Show the state of a run, again and again, until it ends; return the last report."""
    run, never = Run(), threading.Event()
    while True:
        for event in follower.look():
            run.take(event)
        if run.hosts:
            report = run.report()
            for view in views:
                view(report)
            if report.over:
                return report
        clock.wait(never, INTERVAL)


def lines(clock: Clock = SYSTEM_CLOCK) -> View:
    """Return a view that writes a line for each fact that changes, and the progress from time to time."""
    shown: dict[str, str] = {}
    told = 0.0  # when

    def view(report: Report) -> None:
        nonlocal told
        now = clock.now()
        facts = text.facts(report, now)
        new = [name for name in _STEADY if name in facts and facts[name] != shown.get(name)]
        if facts["progress"] != shown.get("progress") and (new or report.over or now - told >= _PROGRESS):
            new.append("progress")
        if new:
            told = now
            shown.update({name: facts[name] for name in new})
            sys.stdout.writelines(
                f"{text.clock_time(now)} {name}: {printable(facts[name])}\n" for name in new
            )
            sys.stdout.flush()

    return view


@contextmanager
def _terminal(folder: Path) -> Iterator[View]:
    waiting = printer.plain(f"reading the record in {folder}, or waiting for the first event …")
    with Live(waiting, console=printer.console_for(sys.stdout), auto_refresh=False) as display:
        display.refresh()
        yield lambda report: display.update(frame(folder, report, SYSTEM_CLOCK.now()), refresh=True)


def frame(folder: Path, report: Report, now: float) -> Table:
    return printer.pairs({"run": str(folder), **text.facts(report, now)})


# -- report --prometheus -------------------------------------------------------------------------------


@contextmanager
def _metrics(folder: Path, where: Endpoint | Path) -> Iterator[View]:
    """Yield a view that exports metrics: to a file at each look, or over HTTP."""
    try:
        from hvdrecover.reporting import prometheus
    except ImportError as error:
        problem = f"prometheus_client cannot be imported ({error}); pip install 'hvdrecover[prometheus]'"
        raise ConfigError("--prometheus", problem) from error
    exporter = prometheus.Exporter(str(folder))
    if isinstance(where, Path):

        def write(report: Report) -> None:
            exporter.update(report)
            # Even without a change: the age of the file shows whether the run is watched.
            prometheus.write(exporter, where)

        yield write
        return
    host, port = where
    with prometheus.serving(exporter, host, port) as taken:
        sys.stderr.write(f"hvdrecover: metrics are served at {host}:{taken}\n")
        yield exporter.update
        # Wait until the end of the run is scraped.
        exporter.seen.wait(_LAST_SCRAPE)
        SYSTEM_CLOCK.wait(threading.Event(), _LAST_ANSWER)
