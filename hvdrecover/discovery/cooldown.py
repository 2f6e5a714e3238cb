"""Cooldown of hosts on which guardians have given up slots repeatedly.

The supervisor appends a line of JSON to a file for each slot given up; host discovery reads the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

FIRST, LONGEST = 60.0, 3600.0  # seconds of cooldown; it doubles with each report
_REMEMBERED = 6 * 3600.0  # seconds for which a report counts
_REPEATED = 2  # reports that begin a cooldown


def report(path: Path, host: str, now: float) -> None:
    """Report a host on which a slot was given up. Raises `OSError` if the file cannot be written."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{json.dumps({'time': now, 'host': host})}\n".encode())


def read(path: Path | None) -> dict[str, list[float]]:
    """Return the times at which each host was reported; empty without a file."""
    reports: dict[str, list[float]] = {}
    try:
        lines = path.read_bytes().splitlines() if path is not None else []
    except OSError:
        return reports
    for line in lines:
        try:
            entry = json.loads(line)
            reports.setdefault(str(entry["host"]), []).append(float(entry["time"]))
        except (ValueError, TypeError, KeyError):  # incomplete: its writer was killed
            continue
    return reports


def ends_at(reports: Sequence[float], now: float) -> float:
    """Return when the cooldown of a host with these reports ends; 0 if it is in none.

    A report from the future is ignored: the clock was set back after it.
    """
    recent = sorted(time for time in reports if -FIRST < now - time < _REMEMBERED)
    if len(recent) < _REPEATED:
        return 0.0
    doublings = min(len(recent) - _REPEATED, 16)
    until = recent[-1] + min(LONGEST, FIRST * 2.0**doublings)
    return until if until > now else 0.0
