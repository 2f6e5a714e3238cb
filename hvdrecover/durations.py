"""Durations as people write them: ``30s``, ``10m``, ``2h``, ``7d``, ``2w``; a bare number is seconds."""

from __future__ import annotations

import math

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
EXAMPLES = "30s, 10m, 2h, 7d or 2w"


def parse(text: str) -> float:
    """Return a duration in seconds.

    Raises:
        ValueError: it is not one, or not above 0.
    """
    unit = _UNITS.get(text[-1:])
    number = text if unit is None else text[:-1]
    seconds = float(number) * (unit or 1)
    if not number.isascii() or number != number.strip() or not 0 < seconds < math.inf:
        raise ValueError(f"'{text}' is not a duration above 0 such as {EXAMPLES}")
    return seconds
