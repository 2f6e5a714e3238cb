"""The types of options."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hvdrecover import durations
from hvdrecover.errors import ConfigError
from hvdrecover.record import RUNS

if TYPE_CHECKING:
    from hvdrecover.checkpoint.settings import Best

_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NBYTES = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)B?")
_BEST = re.compile(r"([^:]*):(min|max)(?::(.*))?")


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add the folder that names a run."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        help="the folder of the run; by default the one that HVDRECOVER_EVENTS names, "
        f"else the newest run below ./{RUNS}",
    )


def add_processes(parser: argparse._ActionsContainer) -> None:
    """Add the number of processes that a job starts with."""
    parser.add_argument(
        "-np",
        "--num-proc",
        type=count,
        required=True,
        metavar="N",
        dest="processes",
        help="processes to start with",
    )


def count(text: str) -> int:
    """A number from 1 on."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 on")
    return int(text)


def number(text: str) -> int:
    """A number from 0 on."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 on")
    return int(text)


def duration(text: str) -> float:
    """A duration, in seconds."""
    try:
        return durations.parse(text)
    except ValueError:
        problem = f"'{text}' is not a duration above 0 such as {durations.EXAMPLES}"
        raise argparse.ArgumentTypeError(problem) from None


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


def hang_timeout(text: str) -> float:
    """A duration that Horovod's own limits, of whole seconds, can be told from."""
    from hvdrecover.launch.hangs import LEAST_TIMEOUT

    value = duration(text)
    if value < LEAST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} is less than {LEAST_TIMEOUT:g} seconds")
    return value


DURATIONS = f"A DURATION is {durations.EXAMPLES}; a bare number is seconds."
"""For the end of help texts."""
