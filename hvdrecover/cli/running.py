"""``hvdrecover status`` and ``hvdrecover stop``: what runs, and its end at a durable commit."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config, record
from hvdrecover.cli import options
from hvdrecover.clock import SYSTEM_CLOCK

if TYPE_CHECKING:
    from hvdrecover.launch.presence import Supervised
    from hvdrecover.reporting.summary import Fault, Report

_MARGIN = 60.0  # seconds beyond the grace for a job to end: what can't be killed is waited for


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    status = _command(
        commands,
        "status",
        _status,
        "say what runs: ranks, commits, standbys, the last fault",
        "Exits with 1 if nothing of the run is running any more.",
    )
    status.add_argument("--json", action="store_true", help="write JSON (docs/commands.md)")
    _command(
        commands,
        "stop",
        _stop,
        "have a job leave at a durable commit, and wait for its end",
        "It does what a signal to its supervisor does: `hvdrecover run` exits with 75, and resumes there "
        "when it is started again. To be called on that host. Exits with 1 if the newest commit has not "
        "become durable.",
    )


def _command(
    commands: argparse._SubParsersAction[Any], name: str, run: Any, help: str, more: str
) -> argparse.ArgumentParser:
    description = f"{help[0].upper()}{help[1:]}. {more}"
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=description)
    options.add_run(parser)
    parser.set_defaults(run=run)
    return parser


def _find(arguments: argparse.Namespace) -> tuple[Path, Supervised | None]:
    from hvdrecover.launch import presence

    folder = record.locate(arguments.folder, config.read().events)
    return folder, presence.find(folder)


def _status(arguments: argparse.Namespace) -> int:
    from hvdrecover.cli import printer
    from hvdrecover.reporting import summary

    folder, supervised = _find(arguments)
    status = summary.summarise(record.read(folder))
    now = SYSTEM_CLOCK.now()
    if arguments.json:
        sys.stdout.write(printer.dumps(document(folder, supervised, status, now)))
    else:
        printer.put(printer.pairs({"run": str(folder), **facts(supervised, status, now)}))
    return 1 if _runs(supervised, status) is False else 0


def _stop(arguments: argparse.Namespace) -> int:
    from hvdrecover.errors import LaunchError
    from hvdrecover.launch import presence
    from hvdrecover.reporting import summary

    folder, supervised = _find(arguments)
    if supervised is None:
        problem = "no supervisor of this run is known: it has ended, or `hvdrecover run` did not start it"
        raise LaunchError(str(folder), problem)
    leaving = presence.ask_to_leave(supervised)
    sys.stderr.write(f"hvdrecover: the job leaves at its next commit, within {supervised.grace:g} s\n")
    if not leaving.wait(supervised.grace + _MARGIN):
        problem = "the supervisor still runs; look at what it says, or kill it"
        raise LaunchError(f"process {supervised.pid}", problem)
    status = summary.summarise(record.read(folder))
    newest, durable = (each.number if each else None for each in (status.commit, status.durable))
    kept = f"commit {durable} is durable" if durable is not None else "no commit is durable"
    lost = f", commit {newest} is not" if newest != durable else ""
    if status.ending.code is None:  # a supervisor that ends by itself writes how
        problem = (
            "the supervisor was killed before the job had left; look at what still runs, and start it again"
        )
        raise LaunchError(f"process {supervised.pid}", problem)
    sys.stdout.write(f"the job has ended with exit code {status.ending.code}; {kept}{lost}\n")
    return 0 if newest == durable else 1


def _runs(supervised: Supervised | None, status: Report) -> bool | None:
    """Return whether a run is running; None if only its events can tell, and they have no end."""
    if supervised is not None and supervised.lives is not None:
        return supervised.lives
    return False if status.over else None


def facts(supervised: Supervised | None, status: Report, now: float) -> dict[str, str]:
    """Return what there is to say to people, by name."""
    from hvdrecover.reporting import text

    said = text.status(status, now)
    found = {"state": _state(supervised, status, said["state"])}
    if supervised is not None:
        found["supervisor"] = f"process {supervised.pid} on {supervised.host}"
        found["command"] = shlex.join(supervised.command)
    found["ranks"] = _ranks(supervised, status)
    found["standbys"] = f"{status.standbys} ready"
    kept = ("last event", "progress", "durable", "storage", "faults", "starts", "given up")
    found |= {name: said[name] for name in kept if said.get(name)}
    if status.faults:
        found["last fault"] = _fault(status.faults[-1])
    return found


def _state(supervised: Supervised | None, status: Report, said: str) -> str:
    runs = _runs(supervised, status)
    if runs is False and not status.over:
        return "gone: its supervisor has ended without a word; start it again to resume"
    if runs and supervised is not None and supervised.leaving:
        return f"{said}; it leaves at its next commit"
    return said


def _ranks(supervised: Supervised | None, status: Report) -> str:
    ranks = status.agreement.ranks if status.agreement is not None else 0
    if supervised is None:
        return str(ranks)
    least = f"; {supervised.least} suffice" if supervised.least < supervised.processes else ""
    return f"{ranks} of {supervised.processes}{least}"


def _fault(fault: Fault) -> str:
    from hvdrecover.reporting import text

    recovered = text.duration(fault.recovery.seconds) if fault.recovery else ""
    after = f"recovered in {recovered}" if recovered else "not recovered from yet"
    return f"{text.clock_time(fault.time)} {text.the_fault(fault)}; {after}"


def document(folder: Path, supervised: Supervised | None, status: Report, now: float) -> dict[str, Any]:
    """Return the same as JSON."""
    from hvdrecover.cli.report import fault_document

    agreement, commit, durable = status.agreement, status.commit, status.durable
    return {
        "folder": str(folder),
        "running": _runs(supervised, status),
        "state": status.activity,
        "leaving": supervised is not None and supervised.leaving,
        "host": supervised.host if supervised is not None else None,
        "pid": supervised.pid if supervised is not None else None,
        "command": list(supervised.command) if supervised is not None else None,
        "ranks": agreement.ranks if agreement is not None else None,
        "processes": supervised.processes if supervised is not None else None,
        "least": supervised.least if supervised is not None else None,
        "standbys": status.standbys,
        "generation": commit.generation if commit is not None else None,
        "commit": commit.number if commit is not None else None,
        "durable_commit": durable.number if durable is not None else None,
        "durable_age": max(now - durable.time, 0.0) if durable is not None else None,
        "last_event": status.end,
        "last_fault": fault_document(status.faults[-1]) if status.faults else None,
    }
