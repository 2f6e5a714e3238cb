"""``hvdrecover report``: what a run's events come to; see ``docs/commands.md``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config, record
from hvdrecover.cli import options, watching
from hvdrecover.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hvdrecover.reporting.summary import Fault, Report, Tally

_SHOWN = 20  # faults
_WIDE = 120  # columns; narrower terminals have no room for the phases of recoveries


def add_report(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    help = "show a run's faults, times to recover, and goodput"
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help=help,
        description=f"{help[0].upper()}{help[1:]}, from its record. The run may still be under way.",
    )
    options.add_run(parser)
    parser.add_argument("--json", action="store_true", help="write JSON (docs/commands.md)")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="also write a page that holds it all in one file"
    )
    watching.add(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from hvdrecover.cli import printer
    from hvdrecover.reporting.summary import Run

    folder = record.locate(arguments.folder, config.read().events)
    if arguments.watch:
        return watching.run(folder, arguments)
    run = Run(record.read(folder))
    report = run.report()
    if arguments.prometheus is not None:
        watching.export(folder, report, arguments.prometheus)
    if arguments.html is not None:
        from hvdrecover.reporting import page

        page.write(str(folder), run, arguments.html)
    if arguments.json:
        sys.stdout.write(printer.dumps(document(folder, report)))
    else:
        printer.put(table(folder, report, SYSTEM_CLOCK.now()))
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
        "machine": report.machine,
        "versions": dict(report.versions),
        "goodput": report.goodput,
        "steps_repeated": report.steps_repeated,
        "commits_repeated": report.commits_repeated,
        "kinds": {kind: _tally(tally) for kind, tally in report.kinds.items()},
        "faults": [fault_document(fault) for fault in report.faults],
        "durable_commits": report.durables,
        "storage_outages": report.outages,
    }


def table(folder: Path, report: Report, now: float) -> RenderableType:
    """A report for people."""
    from rich.console import Console, Group
    from rich.text import Text

    from hvdrecover.cli.printer import age, faults, grid, pairs, plain, section
    from hvdrecover.reporting import text
    from hvdrecover.reporting.summary import PHASES

    facts = pairs({"run": str(folder), **text.facts(report, f"{age(now - report.end)} ago")})
    if not report.faults:
        return Group(facts, Text(), Text("no faults"))
    kinds = grid("fault", "count>", "recovered>", "median>", "worst>")
    tallies = report.kinds | ({"all": report.overall} if len(report.kinds) > 1 else {})
    for kind, tally in tallies.items():
        row = (
            str(tally.count),
            str(tally.recovered),
            text.median(tally),
            text.duration(tally.worst),
        )
        kinds.add_row(plain(kind), *row)
    phases = () if sys.stdout.isatty() and Console().width < _WIDE else PHASES
    left_out = len(report.faults) - _SHOWN
    title = "faults" if left_out <= 0 else f"the last {_SHOWN} faults (--json lists all {len(report.faults)})"
    return Group(
        facts, section("time to recover", kinds), section(title, faults(report.faults[-_SHOWN:], phases))
    )


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "count": tally.count,
        "recovered": tally.recovered,
        "median_seconds": tally.median,
        "worst_seconds": tally.worst,
    }


def fault_document(fault: Fault) -> dict[str, Any]:
    """A fault as JSON."""
    recovery = fault.recovery
    return {
        "time": fault.time,
        "fault": fault.kind,
        "host": fault.host,
        "rank": fault.rank,
        "exit": fault.exit,
        "steps": fault.steps,
        "detail": fault.detail,
        "continued": fault.continued,
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
