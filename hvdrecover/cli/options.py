"""The meaning of options."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hvdrecover.errors import ConfigError

if TYPE_CHECKING:
    from hvdrecover.checkpoint.settings import Best

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?)([{''.join(_SECONDS)}]?)")
_MULTIPLES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_NBYTES = re.compile(r"(\d+(?:\.\d+)?)([kKMGT]?)B?")
_BEST = re.compile(r"([^:]*):(min|max)(?::(.*))?")


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


def seconds(text: str) -> float:
    """A duration: seconds, or a number with one of the units s, m, h, d, w."""
    match = _DURATION.fullmatch(text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' is not a duration such as 3600, 90m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


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

    value = seconds(text)
    if value < LEAST_TIMEOUT:
        raise argparse.ArgumentTypeError(f"{text} is less than {LEAST_TIMEOUT:g} seconds")
    return value
