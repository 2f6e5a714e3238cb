"""``hvdrecover drill``: see whether a training script recovers, by letting faults strike it."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import config, events
from hvdrecover.cli import options
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import printable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from hvdrecover.drill.lab import Lab
    from hvdrecover.drill.run import Command
    from hvdrecover.drill.verdict import Outcome

DRILLS = Path("hvdrecover-drills")  # takes the folders of drills by default


def add_drill(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to the command line."""
    drill = commands.add_parser(
        "drill",
        usage="hvdrecover drill -np N [options] [options of hvdrecover run] python train.py ...",
        help="see whether a script recovers, by letting faults strike it",
        description="Run a training script undisturbed, then with faults, and tell whether it recovers. The "
        "script and its checkpoint root are left as they are: all commits go to the drill's own folder. "
        "Options that are not listed here are those of `hvdrecover run`.",
        epilog=options.DURATIONS,
        allow_abbrev=False,
    )
    options.add_processes(drill)
    drill.add_argument(
        "--lab",
        type=options.count,
        metavar="N",
        help="run on N hosts of network namespaces on this machine, with a rank on each; those beyond "
        "-np are spare; a host can be cut off then (needs root; default: on this host)",
    )
    drill.add_argument(
        "--resize",
        action="store_true",
        help="change the number of ranks between 1 and -np: hosts leave and come, and ranks are killed; a "
        "script with virtual ranks must end with the same, bit by bit",
    )
    drill.add_argument("--faults", metavar="NAME,...", help="which strike (default: all that can)")
    drill.add_argument(
        "--seed", type=options.number, default=0, metavar="N", help="of all that is random (default: 0)"
    )
    drill.add_argument(
        "--rate",
        type=options.duration,
        metavar="DURATION",
        help="let them strike at random, with this mean time between them (default: each strikes once)",
    )
    drill.add_argument(
        "--repeat",
        type=options.count,
        default=1,
        metavar="N",
        help="how often each strikes, or with --rate the number of runs (default: 1)",
    )
    drill.add_argument(
        "--duration",
        type=options.duration,
        metavar="DURATION",
        help="end the undisturbed run after this time, and the others at the same commit (default: when the "
        "script ends)",
    )
    drill.add_argument("--replay", type=Path, metavar="FILE", help="the schedule.json of an earlier drill")
    drill.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"for all of the drill's files (default: below ./{DRILLS})",
    )
    drill.add_argument("--json", action="store_true", help="write JSON (docs/drill.md)")
    drill.set_defaults(run=run, refuse=drill.error)


def run(arguments: argparse.Namespace) -> int:
    """Drill a script, and return 0 if it recovers, else 1."""
    folder = (arguments.output or DRILLS / events.new_run(SYSTEM_CLOCK).name).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--output", f"'{folder}' is a file, or a folder that is not empty; name a new one")
    events.show_on_terminal(config.read())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinding ends the job
    outcome = _drill(arguments, folder)
    (folder / "verdict.json").write_text(outcome.json())
    text = printable(outcome.text(), "\n")
    (folder / "verdict.txt").write_text(text)
    sys.stdout.write(outcome.json() if arguments.json else text)
    return 0 if outcome.recovers else 1


def _drill(arguments: argparse.Namespace, folder: Path) -> Outcome:
    from hvdrecover.drill import schedule
    from hvdrecover.drill.drill import Drill
    from hvdrecover.drill.faults import FAULTS, RESIZING, find
    from hvdrecover.drill.run import Command

    replayed = schedule.load(arguments.replay) if arguments.replay is not None else None
    usual = RESIZING if arguments.resize else tuple(FAULTS)
    names = arguments.faults.split(",") if arguments.faults is not None else usual
    if replayed is not None:
        names = tuple(dict.fromkeys(strike.fault for run in replayed.runs for strike in run))
    faults = find(names)
    command = Command(
        tuple(arguments.command), arguments.processes, tuple(arguments.others), arguments.resize
    )
    with _lab(arguments.lab, command) as lab:
        drill = Drill(folder, command, duration=arguments.duration, lab=lab)
        skipped = {fault.name: why for fault in faults if (why := fault.lacks(command, lab))}
        chosen = [fault.name for fault in faults if fault.name not in skipped]
        if skipped and (replayed is not None or not chosen):
            option = "--faults" if replayed is None else "--replay"
            reasons = "; ".join(f"{fault} needs {why}" for fault, why in skipped.items())
            raise ConfigError(option, f"these faults can't strike here: {reasons}")
        events.logger.info("drill: the undisturbed run begins; all files of the drill go to %s", folder)
        commits = drill.rehearse()
        facts: dict[str, Any] = {
            "seed": arguments.seed,
            "processes": arguments.processes,
            "commits": commits,
            "repeat": arguments.repeat,
        }
        if replayed is not None:
            plan = replayed
        elif arguments.rate is None:
            plan = schedule.each_once(chosen, **facts)
        else:
            plan = schedule.at_random(chosen, mean=arguments.rate / drill.seconds_per_commit, **facts)
        return drill.strike(plan, skipped)


def _lab(hosts: int | None, command: Command) -> AbstractContextManager[Lab | None]:
    """Return the hosts that ``--lab`` asks for.

    Raises:
        ConfigError: they would be too few, conflict with other options, or cannot be made here.
        LabError: making them has failed.
    """
    from hvdrecover.drill import lab

    if hosts is None:
        return nullcontext()
    if hosts <= (ranks := command.processes):
        why = f"a rank is on each, and one more must be spare; write --lab {ranks + 1}"
        raise ConfigError("--lab", f"{hosts} hosts are too few for -np {ranks}: {why}")
    if conflicting := command.conflicts_with_lab:
        raise ConfigError("--lab", f"it decides where the script runs; leave out {', '.join(conflicting)}")
    if lacking := lab.lacks():
        raise ConfigError("--lab", lacking)
    return lab.Lab(hosts)
