"""The cost of many guardians for their supervisor, and its reaction to a fault of one of them."""

from __future__ import annotations

import json
import sys

from benchmarks.rows import Curve
from benchmarks.states import Setting
from hvdrecover.drill.run import Job
from hvdrecover.errors import HvdrecoverError

_GUARDIANS = {"full": (10, 100, 500, 1000, 2000), "small": (40,)}
_SECONDS = {"full": 5.0, "small": 0.5}  # of watching their supervisor
_FAULTS = {"full": 8, "small": 2}
_PATIENCE = 300.0
_FIGURES = {
    "coming": ("until all guardians have come", "ms"),
    "cpu": ("processor time of the supervisor", "ms/s"),
    "reaction": ("from a stall that is reported to the orders to all", "ms"),
    "end": ("from a fault that ends the start to the orders to all", "ms"),
}


def measure(setting: Setting) -> list[Curve]:
    """A real supervisor with a real ``horovodrun``, whose only worker connects stub guardians."""
    found = {float(count): _found(setting, count) for count in _GUARDIANS[setting.size]}
    return [
        Curve("guardians", what, unit, "guardians", "simulated", _milliseconds(found, key))
        for key, (what, unit) in _FIGURES.items()
    ]


def _milliseconds(found: dict[float, dict[str, list[float]]], key: str) -> dict[float, list[float]]:
    return {count: [1e3 * seconds for seconds in each[key]] for count, each in found.items()}


def _found(setting: Setting, count: int) -> dict[str, list[float]]:
    folder = setting.folder / str(count)
    folder.mkdir()
    result = folder / "found.json"
    arguments = [count, _SECONDS[setting.size], _FAULTS[setting.size], result]
    command = [sys.executable, "-m", "benchmarks.guardians.supervised", folder, *arguments]
    job = Job([str(word) for word in command], folder / "job.log", {"HVDRECOVER_EVENTS": str(folder)})
    try:
        job.wait(_PATIENCE)  # not with 0: the last fault ends it
    finally:
        job.kill()
    if not result.exists():
        raise HvdrecoverError(f"{count} stub guardians failed; their log ends with\n{job.tail()}")
    found: dict[str, list[float]] = json.loads(result.read_text())
    return found
