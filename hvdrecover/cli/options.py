"""Options that several commands have, and the types of their values."""

from __future__ import annotations

import argparse
import functools
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdrecover import config
from hvdrecover.events import RUNS

_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NBYTES = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)B?")


def add_json(parser: argparse.ArgumentParser, page: str = "docs/commands.md") -> None:
    parser.add_argument("--json", action="store_true", help=f"write JSON ({page})")


def add_run(parser: argparse.ArgumentParser) -> None:
    default = f"by default the one that HVDRECOVER_EVENTS names, else the newest run below ./{RUNS}"
    folder = f"the folder of the run; {default}"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help=folder)


def add_hosts(job: argparse._ArgumentGroup) -> argparse._MutuallyExclusiveGroup:
    """Add where a job runs and how its hosts are reached; returns the group of what names hosts."""
    hosts = job.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts (default: this one)")
    of_each = "a line host slots=N for each host"
    hosts.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE", help=of_each)
    source = 'find hosts as `hvdrecover discover SOURCE` does: slurm, or "file hosts --exclude gpu7"'
    hosts.add_argument("--discover", metavar="SOURCE", help=source)
    names: dict[str, Any] = {"action": "append", "metavar": "NAME", "dest": "interfaces", "default": []}
    interface = "of all hosts; can be given several times (default: found by Horovod)"
    job.add_argument("--network-interface", "--network-interfaces", **names, help=interface)
    job.add_argument("-p", "--ssh-port", type=count, metavar="PORT", help="of all hosts")
    job.add_argument("-i", "--identity", "--ssh-identity-file", metavar="FILE", help="ssh's private key")
    return hosts


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the type of an option. argparse shows the text of an ArgumentTypeError only."""

    def check(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return check


def end_by_exception() -> None:
    """Turn SIGTERM and SIGHUP into an exception, so that child processes are ended and folders removed."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, and it must stay ignored
            signal.signal(number, lambda number, _: sys.exit(128 + number))


count = checked(functools.partial(config.number, least=1))


def add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options for settings, by default all that are options; `given` returns their texts."""
    for setting in config.SETTINGS:
        if setting.name in names or (setting.option and not names):
            value: dict[str, Any] = {"action": "store_const", "const": "1"}
            if setting.value:
                value = {"type": functools.partial(_text, setting.parse), "metavar": setting.value}
            parser.add_argument(setting.flag, dest=setting.variable, help=setting.help, **value)


def _text(parse: Callable[[str], Any], text: str) -> str:
    """Check a text, and hand it on as it is."""
    checked(parse)(text)
    return text


def given(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the variables for the settings that the command line gives."""
    found = {setting.variable: getattr(arguments, setting.variable, None) for setting in config.SETTINGS}
    return {name: text for name, text in found.items() if text is not None}


def nbytes(text: str) -> int:
    """A number of bytes: ``500M``, ``2.5G`` or ``1T``, in decimal units."""
    match = _NBYTES.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 500M, 2.5G or 1T")
    return round(float(match[1]) * _MULTIPLES[match[2].upper()])


# The type of an option with the name of its value, for ``add_argument``.
COUNT: dict[str, Any] = {"type": count, "metavar": "N"}
NUMBER: dict[str, Any] = {"type": checked(config.number), "metavar": "N"}
DURATION: dict[str, Any] = {"type": checked(config.duration), "metavar": "DURATION"}
PROCESSES: dict[str, Any] = {"type": count, "metavar": "N", "dest": "processes"}

# For the end of help texts.
DURATIONS = f"A DURATION is {config.DURATIONS}; a bare number is seconds."
