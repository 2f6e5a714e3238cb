"""``hvdrecover drill``: see whether a training script recovers, by letting faults strike it."""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

from hvdrecover import config, events
from hvdrecover.cli import launching, options, printer
from hvdrecover.clock import SYSTEM_CLOCK
from hvdrecover.drill import lab
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


def run_drill(arguments: argparse.Namespace) -> int:
    # Wrong values end the drill before its first run, and -H or the like where the drill names the hosts.
    ours = ["--discover", "file"] if arguments.lab or arguments.resize else []
    launching.check_values(_of_a_job().parse_args(["-np", "1", *ours, *arguments.others]).others)
    folder = (arguments.output or DRILLS / events.new_run(SYSTEM_CLOCK).name).absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError("--output", f"'{folder}' is a file, or a folder that is not empty; name a new one")
    events.show_on_terminal(config.read())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinding ends the job
    outcome = _drill(arguments, folder)
    text, document = printable(outcome.text(), "\n"), printer.json_text(outcome)
    (folder / "verdict.json").write_text(document)
    (folder / "verdict.txt").write_text(text)
    sys.stdout.write(document if arguments.json else text)
    return 0 if outcome.recovers else 1


def _drill(arguments: argparse.Namespace, folder: Path) -> Outcome:
    usual = RESIZING if arguments.resize else tuple(FAULTS)
    faults = find(arguments.faults.split(",") if arguments.faults is not None else usual)
    words, others, ranks = tuple(arguments.command), tuple(arguments.others), arguments.processes
    command = Command(words, ranks, others, arguments.resize)
    with ExitStack() as stack:
        hosts = None
        if arguments.lab is not None:
            if arguments.lab <= ranks:
                why = f"a rank is on each, and one more must be spare; write --lab {ranks + 1}"
                raise ConfigError("--lab", f"{arguments.lab} hosts are too few for -np {ranks}: {why}")
            if lacking := lab.lacks():
                raise ConfigError("--lab", lacking)
            hosts = stack.enter_context(lab.Lab(arguments.lab))
        drill = Drill(folder, command, arguments.duration, hosts)
        return drill.run(faults, seed=arguments.seed, repeat=arguments.repeat)
