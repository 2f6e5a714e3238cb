"""``hvdrecover report``: what a run's events come to; see ``docs/commands.md``."""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.events import RUNS

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hvdrecover.reporting.summary import Fault, Report, Tally

_SHOWN = 20  # faults
_WIDE = 120  # columns; narrower terminals have no room for the phases of recoveries

_OUTCOMES = {
    "finished": "finished",
    "ended": "ended before it was finished",
    "open": "no end yet: it is going on, or all was killed",
}


def add_report(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    help = "show a run's faults, the time to recover from them, and its goodput"
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help=help,
        description=f"{help[0].upper()}{help[1:]}, from its event files. The run may still be going on.",
    )
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        help="the folder of the run's event files; by default the one that HVDRECOVER_EVENTS names, "
        f"else the newest run below ./{RUNS}",
    )
    parser.add_argument("--json", action="store_true", help="write JSON (docs/commands.md)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hvdrecover.cli import documents, tables
    from hvdrecover.reporting import reading, summary

    folder = reading.locate(arguments.folder, config.read().events, RUNS)
    report = summary.summarise(reading.read(folder))
    if arguments.json:
        sys.stdout.write(documents.dumps(document(folder, report)))
    else:
        tables.put(table(folder, report, SYSTEM_CLOCK.now()))
    return 0


def document(folder: Path, report: Report) -> dict[str, Any]:
    """A report as JSON."""
    return {
        "folder": str(folder),
        "outcome": report.ending.outcome,
        "code": report.ending.code,
        "reason": report.ending.reason,
        "begin": report.begin,
        "end": report.end,
        "wall_seconds": report.end - report.begin,
        "starts": report.starts,
        "restarts": report.restarts,
        "warm_restarts": report.warm,
        "given_up": list(report.given_up),
        "goodput": report.goodput,
        "steps_repeated": report.steps_repeated,
        "commits_repeated": report.commits_repeated,
        "kinds": {kind: _tally(tally) for kind, tally in report.kinds.items()},
        "faults": [_fault(fault) for fault in report.faults],
        "clocks": dict(report.clocks),
        "files": report.files,
        "lines_passed_over": report.passed_over,
    }


def table(folder: Path, report: Report, now: float) -> RenderableType:
    """A report for people."""
    from rich.console import Group
    from rich.text import Text

    from hvdrecover.cli.tables import grid, plain, section

    facts = grid("", "")
    facts.show_header = False
    for name, value in _facts(folder, report, now).items():
        facts.add_row(name, plain(value))
    if not report.faults:
        return Group(facts, Text(), Text("no faults"))
    kinds = grid("fault", "count>", "recovered>", "median>", "worst>")
    tallies = report.kinds | ({"all": report.overall} if len(report.kinds) > 1 else {})
    for kind, tally in tallies.items():
        row = str(tally.count), str(tally.recovered), _duration(tally.median), _duration(tally.worst)
        kinds.add_row(plain(kind), *row)
    left_out = len(report.faults) - _SHOWN
    title = "faults" if left_out <= 0 else f"the last {_SHOWN} faults (--json lists all {len(report.faults)})"
    return Group(facts, section("time to recover", kinds), section(title, _lines(report.faults[-_SHOWN:])))


def _facts(folder: Path, report: Report, now: float) -> dict[str, str]:
    from hvdrecover.cli.tables import age

    ending = report.ending
    outcome = _OUTCOMES[ending.outcome]
    if ending.outcome == "open":
        outcome += f" (last event {age(now - report.end)} ago)"
    elif ending.outcome == "ended":
        outcome += f", with code {ending.code}: {ending.reason}"
    begin = _moment(report.begin).isoformat(" ", "seconds")
    starts = f"{report.starts} of the job, {report.restarts} of single processes"
    facts = {
        "run": str(folder),
        "outcome": outcome,
        "wall time": f"{_duration(report.end - report.begin)} from {begin}",
        "goodput": "" if report.goodput is None else f"{report.goodput:.1%} of the time in committed steps",
        "repeated": f"{report.steps_repeated} steps, {report.commits_repeated} commits",
    }
    if report.starts or report.restarts:  # else there was neither a supervisor nor a guardian
        facts["starts"] = starts + (f" ({report.warm} taken over by a standby)" if report.warm else "")
    if report.given_up:
        facts["given up"] = "; ".join(report.given_up)
    if report.clocks:
        wrong = ", ".join(f"{host} by {offset:+.1f} s" for host, offset in report.clocks.items())
        facts["clocks"] = f"wrong, and corrected here: {wrong}"
    return facts


def _lines(faults: tuple[Fault, ...]) -> RenderableType:
    from rich.console import Console

    from hvdrecover.cli.tables import grid, plain
    from hvdrecover.reporting.summary import PHASES

    phases = () if sys.stdout.isatty() and Console().width < _WIDE else PHASES
    headings = [f"{phase.replace('_', ' ')}>" for phase in phases]
    lines = grid("time", "fault", "host", "rank>", "to recover>", *headings, "detail")
    for fault in faults:
        spent = fault.recovery.phases if fault.recovery else {}
        lines.add_row(
            f"{_moment(fault.time):%m-%d %H:%M:%S}",
            plain(fault.kind),
            plain(fault.host),
            _rank(fault.rank),
            _duration(fault.recovery.seconds) if fault.recovery else "not yet",
            *(f"{spent[phase]:.2f}" if phase in spent else "" for phase in phases),
            plain(fault.detail),
        )
    return lines


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "count": tally.count,
        "recovered": tally.recovered,
        "median_seconds": tally.median,
        "worst_seconds": tally.worst,
    }


def _fault(fault: Fault) -> dict[str, Any]:
    recovery = fault.recovery
    return {
        "time": fault.time,
        "fault": fault.kind,
        "host": fault.host,
        "rank": fault.rank,
        "exit": fault.exit,
        "steps": fault.steps,
        "detail": fault.detail,
        "recovery": None
        if recovery is None
        else {
            "generation": recovery.generation,
            "commit": recovery.commit,
            "seconds": recovery.seconds,
            "slowest_rank": recovery.rank,
            "phases": dict(recovery.phases),
        },
    }


def _rank(rank: int | None) -> str:
    if rank is None:
        return "all"
    return str(rank) if rank >= 0 else "none"


def _moment(time: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time).astimezone()


def _duration(seconds: float | None) -> str:
    """A duration with three digits or two units: ``0.31 s``, ``12.4 s``, ``3 min 12 s``."""
    if seconds is None:
        return ""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for length, unit, shorter, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min")):
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // shorter} {name}"
    return f"{whole // 60} min {whole % 60} s"
