"""The command ``hvdrecover``: arguments in, exit codes out.

Each subcommand is a function that imports what it needs, so that the command line answers at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from hvdrecover import config
from hvdrecover.cli import commits, launching, running, unknown
from hvdrecover.cli.diagnosing import add_doctor
from hvdrecover.cli.discovering import add_discover
from hvdrecover.cli.drilling import add_drill
from hvdrecover.cli.report import add_report
from hvdrecover.errors import HvdrecoverError
from hvdrecover.version import __version__


def _install_horovod(arguments: argparse.Namespace) -> int:
    from hvdrecover.install import install_horovod, source_diff

    if arguments.diff:
        sys.stdout.write(source_diff())
        return 0
    installed = install_horovod(rebuild=arguments.rebuild)
    if installed.wheel is None:
        message = f"Horovod {installed.version} is already installed."
    else:
        origin = "built now" if installed.built else "from the cache"
        message = f"Horovod {installed.version} is installed ({origin}: {installed.wheel})."
    sys.stdout.write(message + "\n")
    return 0


GROUPS = {
    "jobs": ("run", "status", "stop", "report", "drill", "doctor", "discover", "install-horovod"),
    "checkpoint roots": ("ls", "show", "verify", "diff", "prune", "export"),
}


class _Parser(argparse.ArgumentParser):
    """A parser that does not repeat credentials."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong with the arguments, and exit with 2."""
        from hvdrecover.redaction import redact

        super().error(redact(message))


def build() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser of the command line, and that of each command."""
    parser = _Parser(
        prog="hvdrecover",
        usage="hvdrecover [--help] [--version] COMMAND ...",
        description="Recovery for Horovod: durable commits, and jobs that are hard to kill.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    version = f"hvdrecover {__version__}"
    parser.add_argument("--version", action="version", version=version, help=argparse.SUPPRESS)
    subcommands = parser.add_subparsers(
        prog="hvdrecover", metavar="COMMAND", required=True, help=argparse.SUPPRESS
    )
    launching.add_commands(subcommands)
    running.add_commands(subcommands)
    add_doctor(subcommands)
    add_discover(subcommands)
    commits.add_commands(subcommands)
    add_report(subcommands)
    add_drill(subcommands)

    install = subcommands.add_parser(
        "install-horovod",
        help="build Horovod for this environment and install it",
        description="Build Horovod for this environment's Python, PyTorch, TensorFlow and MPI, and install "
        "it. A wheel that was built before is taken from the cache. HOROVOD_* variables steer the build: "
        "HOROVOD_GPU_OPERATIONS=NCCL, HOROVOD_WITHOUT_MPI=1 and so on.",
    )
    install.add_argument(
        "--rebuild", action="store_true", help="compile anew, whatever is installed or cached"
    )
    install.add_argument(
        "--diff", action="store_true", help="print all changes to Horovod's source, and install nothing"
    )
    install.set_defaults(run=_install_horovod)
    parser.epilog = _overview({each.dest: each.help or "" for each in subcommands._choices_actions})
    return parser, subcommands.choices


def _overview(commands: Mapping[str, str]) -> str:
    """The commands in groups, on one screen; a command without a help text is not there."""
    lines = []
    for title, names in GROUPS.items():
        lines += [f"{title}:", *(f"  {name:<16} {commands[name]}" for name in names), ""]
    return "\n".join([*lines, "`hvdrecover COMMAND --help` says what a command takes."])


def _refuse_unknown(name: str, others: list[str]) -> None:
    """Exit with 2 if a command is given what neither it nor what it hands options on to knows."""
    parser, commands = build()
    hands_on = name in ("run", "drill")
    if name == "drill":
        _, others = parser.parse_known_args(["run", "-np", "1", *others])
    if others and (unknown_words := unknown.left_over(others) if hands_on else others):
        unknown.refuse(commands[name], unknown_words, with_horovodrun=hands_on)


def _report(error: HvdrecoverError) -> None:
    from rich.console import Console
    from rich.text import Text

    message = Text.assemble(("hvdrecover: ", "bold red"), str(error))
    Console(stderr=True, highlight=False).print(message, soft_wrap=True)


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    """Return what a command line says, and run nothing; wrong arguments exit with 2.

    Args:
        argv: the arguments.
    """
    parser, commands = build()
    if "_ARGCOMPLETE" in config.environment():  # a shell asks for completions; this ends the process
        import argcomplete

        argcomplete.autocomplete(parser)
    words, command = launching.split(list(argv), commands)
    arguments, others = parser.parse_known_args(words)
    if launching.takes_command(words) and not command:
        arguments.refuse("there is no command; write it after the options, as in python train.py")
    _refuse_unknown(words[0], others)
    arguments.named, arguments.others, arguments.command = words[0], others, command
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments; by default those of this process.

    Returns:
        The exit code: 0, 1 after an error of hvdrecover, if a commit is broken or a check fails, or 130 when
        interrupted.
        Wrong arguments exit with 2.
    """
    arguments = parsed(sys.argv[1:] if argv is None else argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except HvdrecoverError as error:
        _report(error)
        return 1
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("hvdrecover: interrupted\n")
        return 130
