"""The objectives of a drill, as a file ``slo.toml``, so that a CI fails when recovery gets worse::

stall_seconds = 0.1      # the longest that a commit may stall training
recovery_seconds = 30.0  # the longest from a fault until all ranks step again
steps_lost = 50          # the most steps that may have to be repeated, in all
goodput = 0.5            # the least share of the time in committed steps, of the runs with faults
samples_lost = 0         # samples of an epoch that may be lost or repeated
rank_local = 0           # tensors and values of a rank that may be another rank's after a recovery
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from hvdrecover.errors import ConfigError


@dataclass(frozen=True)
class Numbers:
    """The result of a drill, or a wish; None for what is not known, or doesn't matter.

    Attributes:
        stall_seconds: of the longest stall.
        recovery_seconds: of the slowest recovery.
        steps_lost: steps that were repeated.
        goodput: the least of all runs with faults, from 0 to 1.
        samples_lost: samples that were lost or repeated.
        rank_local: tensors and values of a rank that were another rank's after a recovery.
    """

    stall_seconds: float | None = None
    recovery_seconds: float | None = None
    steps_lost: float | None = None
    goodput: float | None = None
    samples_lost: float | None = None
    rank_local: float | None = None


def load(path: Path) -> Numbers:
    """Read a file.

    Raises:
        ConfigError: it can't be read, or it names what can't be asked for.
    """
    try:
        wishes = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("--slo", f"'{path}' can't be read: {error}") from error
    known = [field.name for field in fields(Numbers)]
    for name, value in wishes.items():
        if name not in known:
            raise ConfigError(
                "--slo", f"'{path}' asks for '{name}'; what can be asked for is {', '.join(known)}"
            )
        if type(value) not in (int, float) or not value >= 0:
            raise ConfigError("--slo", f"'{path}': {name} is {value!r}, which is not a number from 0 on")
    return Numbers(**wishes)


def missed(wanted: Numbers, found: Numbers) -> Mapping[str, str]:
    """Return what was asked for and is missed: name to what was found instead."""
    lines: dict[str, str] = {}
    for field in fields(Numbers):
        limit, value = getattr(wanted, field.name), getattr(found, field.name)
        if limit is None:
            continue
        if value is None:
            lines[field.name] = f"not known, and {limit:g} is asked for"
        elif value < limit if field.name == "goodput" else value > limit:
            lines[field.name] = f"{value:.3g}, where {limit:g} is asked for"
    return lines
