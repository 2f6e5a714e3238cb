"""The commands that start and watch over jobs; see ``docs/launching.md``."""

from __future__ import annotations

import argparse
from typing import Any

from hvdrecover import config, events
from hvdrecover.cli import options


def add_commands(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the commands to the command line."""
    worker = commands.add_parser(
        "worker",
        help="watch over one training process: restart it in place, end it when it hangs",
        description="Start a training process and watch over it, as the guardian of one slot of a job: "
        "horovodrun ... hvdrecover worker -- python train.py",
    )
    _add_guardian(worker)
    worker.set_defaults(run=_worker)


def _add_guardian(parser: argparse.ArgumentParser) -> None:
    """The options of a guardian, and the command."""
    parser.add_argument(
        "--hang-timeout",
        type=options.hang_timeout,
        metavar="SECONDS",
        help="kill a process that makes no progress for so long; by default 5 times the longest that was "
        "seen, and at least 5 minutes",
    )
    parser.add_argument(
        "--grace",
        type=options.seconds,
        default=30.0,
        metavar="SECONDS",
        help="how long a process may take to leave after a preemption (default: 30)",
    )
    parser.add_argument(
        "--no-standby", action="store_true", help="keep no process in readiness; a restart then takes seconds"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the training command, after --")


def _command(arguments: argparse.Namespace) -> list[str]:
    command: list[str] = arguments.command
    return command[1:] if command[:1] == ["--"] else command


def _worker(arguments: argparse.Namespace) -> int:
    from hvdrecover.launch.guardian import Settings, guard
    from hvdrecover.launch.hangs import Limits

    settings = Settings(Limits(arguments.hang_timeout), arguments.grace, not arguments.no_standby)
    read = config.read()
    events.show_on_terminal(read)
    return guard(_command(arguments), settings, read)
