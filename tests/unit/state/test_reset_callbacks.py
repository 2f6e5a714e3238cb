from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hvdrecover.state.run import run
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import FakeJob, Fault
from tests.unit.state.jobs import URL, Process, initialised


@dataclass
class Scaling:
    """A script that makes the rate 0.1 for each rank when ranks come or go."""

    checkpoint: str | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)  # rank, size, step and the sampler's place
    entries: list[tuple[Any, ...]] = field(default_factory=list)  # rank, size, step and rate

    def run(self, size: int, *faults: Fault) -> None:
        self.calls.clear()
        self.entries.clear()
        FakeJob(initialised(self._script), size, faults).results()

    def _script(self, process: Process) -> None:
        world, model, sampler = process.world, FakeModel(w=0.0), FakeSampler(100)
        optimizer = FakeOptimizer(model, rate=0.1 * world.size())
        state = process.state(self.checkpoint, model=model, optimizer=optimizer, sampler=sampler, step=0)

        def scale() -> None:
            place = (sampler.order.rank, sampler.order.size)
            self.calls.append((world.rank(), world.size(), state.step, place))
            optimizer.rate = 0.1 * world.size()

        @run
        def train(state: Any) -> None:
            self.entries.append((world.rank(), world.size(), state.step, round(optimizer.rate, 3)))
            while state.step < 6:
                world.allreduce(np.zeros(1))
                state.step += 1
                if state.step % 2 == 0:
                    state.commit()
                    state.flush()

        state.register_reset_callbacks([scale])
        train(state)


@pytest.mark.parametrize(
    ("size", "fault", "called"),
    [
        # Ranks are lost: on every survivor, after the state has been rolled back.
        (3, Fault(0, "gradient", 4), [0, 1]),
        # Ranks join, and get the changed rate.
        (1, Fault(0, "gradient", 2, "change", add=2), [0]),
    ],
)
def test_they_are_called_on_every_survivor_and_their_changes_reach_all(
    size: int, fault: Fault, called: list[int]
) -> None:
    scaling, after = Scaling(), 2 if size == 3 else 3
    scaling.run(size, fault)
    assert sorted(scaling.calls) == [(rank, after, 2, (rank, after)) for rank in called]
    entries = [(rank, after, 2, pytest.approx(0.1 * after)) for rank in range(after)]
    assert sorted(entry for entry in scaling.entries if entry[1] == after) == entries


def test_they_are_called_when_a_durable_commit_is_resumed_with_another_number_of_ranks() -> None:
    scaling = Scaling(URL)
    scaling.run(2, Fault(0, "gradient", 4, action="kill_all"))
    scaling.run(3)
    assert sorted(scaling.calls) == [(rank, 3, 2, (rank, 3)) for rank in range(3)]
    assert sorted(scaling.entries) == [(rank, 3, 2, pytest.approx(0.3)) for rank in range(3)]
