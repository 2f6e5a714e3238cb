"""The cost of many guardians for their supervisor, and its reaction to a fault of one of them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from benchmarks.rows import Fact, Row
from benchmarks.states import Setting
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch.job import Job


@dataclass(frozen=True)
class _Amount:
    """The size of the measurement: guardians, seconds of watching their supervisor, and faults."""

    guardians: int
    seconds: float
    faults: int


_AMOUNTS = {"full": _Amount(2000, 20.0, 20), "small": _Amount(40, 0.5, 2)}
_PATIENCE = 300.0


def measure(setting: Setting) -> list[Row | Fact]:
    """A real supervisor with a real ``horovodrun``, whose only worker connects many stub guardians."""
    amount = _AMOUNTS[setting.size]
    result = setting.folder / "found.json"
    arguments = [amount.guardians, amount.seconds, amount.faults, result]
    command = [sys.executable, "-m", "benchmarks.guardians.supervised", setting.folder, *arguments]
    environ = {"HVDRECOVER_EVENTS": str(setting.folder)}
    job = Job([str(word) for word in command], setting.folder / "job.log", environ)
    try:
        job.wait(_PATIENCE)  # not with 0: the last fault ends it
    finally:
        job.kill()
    if not result.exists():
        raise HvdrecoverError(f"the stub guardians failed; their log ends with\n{job.tail()}")
    found = json.loads(result.read_text())
    state = f"{amount.guardians:,} guardians"
    return [
        Row(
            "scale", "processor time of the supervisor", state, "ms/s", [1e3 * each for each in found["cpu"]]
        ),
        Row("scale", "from a stall that is told to the orders to all", state, "ms", _ms(found["reaction"])),
        Row("scale", "from a fault that ends the start to the orders to all", state, "ms", _ms(found["end"])),
        Row("scale", "until all guardians have come", state, "ms", _ms(found["coming"])),
    ]


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * each for each in seconds]
