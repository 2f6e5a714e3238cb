"""Ticks of an axis of time."""

from __future__ import annotations

import math

_STEPS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30),  # seconds
    *(60, 120, 300, 600, 900, 1800),  # minutes
    *(3600, 7200, 10800, 21600, 43200),  # hours
    *(86400 * days for days in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)),
)
_FEW = 6  # steps, so that `ticks` with a few more takes the same
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def rounded_up(length: float) -> float:
    """The next length that is a few round steps, in seconds; so its multiples are round times, too."""
    step = next((step for step in _STEPS if length / step < _FEW), length)
    return math.ceil(length / step) * step


def ticks(length: float, most: int, begin: float = 0.0) -> list[tuple[float, str]]:
    """Round times over a length, and what to write at them.

    Args:
        length: in seconds, at least 0.
        most: how many there may be, at least 2.
        begin: where it begins, in seconds; a multiple of the length.

    Returns:
        Seconds and text, the first at the beginning, all the same number of seconds apart.
    """
    step = next((step for step in _STEPS if length / step < most), length)
    count = int(length / step) + 1 if length else 1
    times = [begin + place * step for place in range(count)]
    return [(time, _text(time, step)) for time in times]


def _text(seconds: float, step: float) -> str:
    if seconds == 0:
        return "0"
    if step < 1:
        return f"{round(seconds, 6):g} s"
    whole, parts = round(seconds), []
    for length, unit in _UNITS:
        if whole >= length:
            parts.append(f"{whole // length} {unit}")
            whole %= length
    if whole:
        parts.append(f"{whole} s")
    return " ".join(parts)
