"""The contents of TensorBoard's event files, as TensorBoard itself reads them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@dataclass(frozen=True)
class Run:
    scalars: dict[str, dict[int, float]]  # by name, the values by step, in the order in which they come
    steps: dict[str, list[int]]  # by name, all steps, also those that come more than once
    times: dict[int, float]  # when each step was, in seconds since the epoch

    def total(self, name: str, steps: Container[int]) -> float:
        return sum(value for step, value in self.scalars[name].items() if step in steps)


def read(folder: Path) -> Run:
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    events = {name: accumulator.Scalars(name) for name in accumulator.Tags()["scalars"]}
    return Run(
        {name: {each.step: each.value for each in found} for name, found in events.items()},
        {name: [each.step for each in found] for name, found in events.items()},
        {each.step: each.wall_time for found in events.values() for each in found},
    )
