"""The command ``hvdrecover``: arguments in, exit codes out.

The module of a command has ``run_NAME``, and ``add_NAME``, whose docstring is part of the help.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from hvdrecover import config
from hvdrecover.checkpoint import redact
from hvdrecover.errors import HvdrecoverError
from hvdrecover.version import __version__

GROUPS = {
    "jobs": {
        "run": ("launching", "start a job by horovodrun, and keep it going"),
        "status": ("runs", "say what runs: ranks, commits, standbys, the last fault"),
        "stop": ("runs", "have a job leave at a durable commit, and wait for its end"),
        "report": ("runs", "show a run's faults, times to recover, and goodput"),
        "drill": ("trying", "see whether a script recovers, by letting faults strike it"),
        "doctor": ("trying", "check hosts, network, Horovod and storage before a job"),
        "discover": ("discovering", "find hosts, as horovodrun --host-discovery-script does"),
        "config": ("launching", "list all settings and their values"),
        "install-horovod": ("launching", "build Horovod for this environment and install it"),
    },
    "checkpoint roots": {
        "ls": ("commits", "list the commits of a checkpoint root, newest first"),
        "show": ("commits", "list a commit's tensors, objects and sample cursors"),
        "verify": ("commits", "read commits through, and compare their digests"),
        "diff": ("commits", "show what differs between two commits of a root"),
        "prune": ("commits", "delete the commits that no rule keeps"),
        "export": ("commits", "write a commit to a file of torch, Keras or safetensors"),
    },
}
"""The module of each command, and its line in the overview. The commands that people call are here."""


class _Parser(argparse.ArgumentParser):
    """A parser that does not repeat credentials."""

    def error(self, message: str) -> NoReturn:
        super().error(redact(message))


def build(
    wanted: Collection[str] | None = None,
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line and those of commands; only wanted commands have options."""
    lines = []
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<16} {help}" for name, (_, help) in names.items()), ""]
    parser = _Parser(
        prog="hvdrecover",
        usage="hvdrecover [--help] [--version] COMMAND ...",
        description="Recovery for Horovod: durable commits, and jobs that are hard to kill.",
        epilog="\n".join([*lines, "`hvdrecover COMMAND --help` lists a command's options."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"hvdrecover {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(
        prog="hvdrecover", dest="named", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    worker = {"worker": ("launching", "")}  # `hvdrecover run` starts it
    for names in (*GROUPS.values(), worker):
        for name, (module, help) in names.items():
            command = commands.add_parser(name, allow_abbrev=False)
            if wanted is None or name in wanted:
                # Only a wanted one: `horovodrun` calls `hvdrecover discover` every second.
                imported = importlib.import_module(f"hvdrecover.cli.{module}")
                function = name.replace("-", "_")
                add = getattr(imported, f"add_{function}")
                command.set_defaults(refuse=command.error, run=getattr(imported, f"run_{function}"))
                command.description = f"{help[:1].upper()}{help[1:]}{'. ' if help else ''}{add.__doc__}"
                add(command)
    return parser, commands.choices


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line and run nothing; wrong arguments exit with 2."""
    if "_ARGCOMPLETE" in config.environment():  # a shell asks for completions; this ends the process
        import argcomplete

        argcomplete.autocomplete(build()[0])
    parser, commands = build(argv)
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        known = commands[arguments.named]._option_string_actions
        meant = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        hint = f"; did you mean {meant[0]}?" if meant else ""
        arguments.refuse(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if "command" in arguments:
        if arguments.command[:1] == ["--"]:
            del arguments.command[0]
        if not arguments.command:
            arguments.refuse("there is no command; write it after the options, as in python train.py")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code is 1 after an error of hvdrecover, or if a check fails."""
    arguments = parsed(sys.argv[1:] if argv is None else argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except HvdrecoverError as error:
        sys.stderr.write(f"hvdrecover: {error}\n")
        return 1
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("hvdrecover: interrupted\n")
        return 130
