"""Options that several commands have, and the types of their values."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdrecover import durations
from hvdrecover.errors import ConfigError
from hvdrecover.record import RUNS

if TYPE_CHECKING:
    from hvdrecover.checkpoint.settings import Best

_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NBYTES = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)B?")
_BEST = re.compile(r"([^:]*):(min|max)(?::(.*))?")


def add_json(parser: argparse.ArgumentParser, page: str = "docs/commands.md") -> None:
    """Add ``--json``, and the page that describes the document."""
    parser.add_argument("--json", action="store_true", help=f"write JSON ({page})")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the folder that names a run."""
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


def count(text: str) -> int:
    """A number from 1 on."""
    return number(text, least=1)


def number(text: str, least: int = 0) -> int:
    """A number from 0 on."""
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from {least} on")
    return int(text)


def duration(text: str) -> float:
    """A duration, in seconds."""
    try:
        return durations.parse(text)
    except ValueError:
        problem = f"'{text}' is not a duration above 0 such as {durations.EXAMPLES}"
        raise argparse.ArgumentTypeError(problem) from None


def hang_timeout(text: str) -> float:
    """A duration that Horovod's own limits, of whole seconds, can be told from."""
    from hvdrecover.launch.hangs import LEAST_TIMEOUT

    value = duration(text)
    if value < LEAST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} is less than {LEAST_TIMEOUT:g} seconds")
    return value


def nbytes(text: str) -> int:
    """A number of bytes: ``500M``, ``2.5G`` or ``1T``, in decimal units."""
    match = _NBYTES.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a size such as 500M, 2.5G or 1T")
    return round(float(match[1]) * _MULTIPLES[match[2].upper()])


def best(text: str) -> Best:
    """``METRIC:min`` or ``METRIC:max``, and after another colon how many: ``val_loss:min:2``."""
    from hvdrecover.checkpoint.settings import Best

    match = _BEST.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not METRIC:min, METRIC:max or METRIC:min:COUNT")
    try:
        return Best(match[1], "min" if match[2] == "min" else "max", count(match[3] or "1"))
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def exported_file(text: str) -> Path:
    """A file to export to, whose name tells the format."""
    path = Path(text)
    if path.suffix not in (".pt", ".keras", ".safetensors"):
        raise argparse.ArgumentTypeError(f"'{text}' ends in none of .pt, .keras and .safetensors")
    return path


# The type of an option with the name of its value, for ``add_argument``.
COUNT: dict[str, Any] = {"type": count, "metavar": "N"}
NUMBER: dict[str, Any] = {"type": number, "metavar": "N"}
DURATION: dict[str, Any] = {"type": duration, "metavar": "DURATION"}
PROCESSES: dict[str, Any] = {"type": count, "metavar": "N", "dest": "processes"}

DURATIONS = f"A DURATION is {durations.EXAMPLES}; a bare number is seconds."
"""For the end of help texts."""
