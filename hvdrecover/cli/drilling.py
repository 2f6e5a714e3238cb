"""``hvdrecover drill``: see whether a training script recovers, by letting faults strike it."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from hvdrecover import config, events
from hvdrecover.cli import launching, options, printer
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.drill import drill, lab
from hvdrecover.drill.drill import Drill, Outcome
from hvdrecover.drill.faults import FAULTS, RESIZING, find
from hvdrecover.drill.run import Command
from hvdrecover.errors import ConfigError
from hvdrecover.redaction import printable

DRILLS = Path("hvdrecover-drills")  # takes the folders of drills by default


def add_drill(parser: argparse.ArgumentParser) -> None:
    """The training script runs undisturbed, then with faults. The script and its checkpoint root are left as
    they are: all commits go to the drill's own folder. Options that are not listed here are those of
    `hvdrecover run`.
    """
    parser.usage = "hvdrecover drill -np N [options] [options of hvdrecover run] python train.py ..."
    parser.epilog = options.DURATIONS
    parser.set_defaults(run=_run)
    options.add_json(parser, "docs/drill.md")
    add = parser.add_argument
    add("-np", "--num-proc", **options.PROCESSES, required=True, help="processes to start with")
    hosts = (
        "run on N hosts of network namespaces on this machine, with a rank on each; those beyond -np are "
        "spare; a host can be cut off then (needs root; default: on this host)"
    )
    add("--lab", **options.COUNT, help=hosts)
    resize = (
        "change the number of ranks between 1 and -np: hosts leave and come, and ranks are killed; a script "
        "with virtual ranks must end with the same, bit by bit"
    )
    add("--resize", action="store_true", help=resize)
    add("--faults", metavar="NAME,...", help="which strike (default: all that can)")
    add("--seed", **options.NUMBER, default=0, help="of all that is random (default: 0)")
    add("--repeat", **options.COUNT, default=1, help="how often each strikes (default: 1)")
    end = "end the undisturbed run after this time, and the others at the same commit"
    add("--duration", **options.DURATION, help=f"{end} (default: when the script ends)")
    output = f"for all of the drill's files (default: below ./{DRILLS})"
    add("-o", "--output", type=Path, metavar="FOLDER", help=output)
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    launching.take_options(parser, _of_a_job())


def _of_a_job() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("hvdrecover drill", allow_abbrev=False, add_help=False)
    launching.add_run(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    job = _of_a_job().parse_args(
        ["-np", "1", *arguments.others]
    )  # wrong values end the drill before its first run
    launching.check_values(job.others)
    folder = (arguments.output or DRILLS / events.new_run(SYSTEM_CLOCK).name).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--output", f"'{folder}' is a file, or a folder that is not empty; name a new one")
    events.show_on_terminal(config.read())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinding ends the job
    outcome = _drill(arguments, folder)
    text, document = printable(drill.text(outcome), "\n"), printer.json_text(outcome)
    (folder / "verdict.json").write_text(document)
    (folder / "verdict.txt").write_text(text)
    sys.stdout.write(document if arguments.json else text)
    return 0 if outcome.recovers else 1


def _drill(arguments: argparse.Namespace, folder: Path) -> Outcome:
    usual = RESIZING if arguments.resize else tuple(FAULTS)
    faults = find(arguments.faults.split(",") if arguments.faults is not None else usual)
    words, others = tuple(arguments.command), tuple(arguments.others)
    command = Command(words, arguments.processes, others, arguments.resize)
    with _lab(arguments.lab, command) as hosts:
        run = Drill(folder, command, duration=arguments.duration, lab=hosts)
        skipped = {fault.name: why for fault in faults if (why := fault.lacks(command, hosts))}
        chosen = [fault.name for fault in faults if fault.name not in skipped]
        if not chosen:
            reasons = "; ".join(f"{fault} needs {why}" for fault, why in skipped.items())
            raise ConfigError("--faults", f"these faults can't strike here: {reasons}")
        events.logger.info("drill: the undisturbed run begins; all files of the drill go to %s", folder)
        facts: dict[str, int] = {"seed": arguments.seed, "processes": arguments.processes}
        commits = run.rehearse()
        plan = drill.schedule(chosen, commits=commits, repeat=arguments.repeat, **facts)
        return run.strike(plan, skipped)


def _lab(hosts: int | None, command: Command) -> AbstractContextManager[lab.Lab | None]:
    """Return the hosts that ``--lab`` asks for."""
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
