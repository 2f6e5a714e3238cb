from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import FakeJob, Fault, change_at, fail_at
from tests.unit.state.jobs import URL, Process, initialised


@dataclass
class Scaling:
    """A script that makes the rate 0.1 for each rank when ranks come or go.

    Attributes:
        calls: what the callbacks saw: rank, size, step and the sampler's place.
        entries: what training functions saw: rank, size, step and rate.
    """

    checkpoint: str | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    entries: list[tuple[Any, ...]] = field(default_factory=list)

    def results(self, size: int, *faults: Fault) -> list[float]:
        return FakeJob(initialised(self._script), size, faults).results()

    def _script(self, process: Process) -> float:
        state = self.made(process)
        run(lambda state: self._train(process, state))(state)
        return float(state.optimizer.rate)

    def made(self, process: Process) -> State:
        model = FakeModel(w=0.0)
        state = process.state(
            self.checkpoint,
            model=model,
            optimizer=FakeOptimizer(model, rate=0.1 * process.world.size()),
            sampler=FakeSampler(100),
            step=0,
        )
        state.register_reset_callbacks([self._noting(process, state)])
        state.register_reset_callbacks([self._scaling(process, state)])
        return state

    def _noting(self, process: Process, state: State) -> Callable[[], None]:
        def note() -> None:
            world, order = process.world, state.sampler.order
            self.calls.append((world.rank(), world.size(), state.step, (order.rank, order.size)))

        return note

    def _scaling(self, process: Process, state: State) -> Callable[[], None]:
        def scale() -> None:
            state.optimizer.rate = 0.1 * process.world.size()

        return scale

    def _train(self, process: Process, state: State) -> None:
        world = process.world
        self.entries.append((world.rank(), world.size(), state.step, round(state.optimizer.rate, 3)))
        while state.step < 6:
            world.allreduce(np.zeros(1))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
                state.flush()


def test_they_are_called_on_every_survivor_of_a_loss_after_the_state_has_been_rolled_back() -> None:
    scaling = Scaling()
    assert scaling.results(3, fail_at(0, "gradient", 4)) == [pytest.approx(0.2)] * 2
    assert sorted(scaling.calls) == [(0, 2, 2, (0, 2)), (1, 2, 2, (1, 2))]


def test_what_they_change_reaches_the_ranks_that_join() -> None:
    scaling = Scaling()
    assert scaling.results(1, change_at(0, "gradient", 2, add=2)) == [pytest.approx(0.3)] * 3
    assert scaling.calls == [(0, 3, 2, (0, 3))]
    assert sorted(scaling.entries)[1:] == [(0, 3, 2, 0.3), (1, 3, 2, 0.3), (2, 3, 2, 0.3)]


def killed(scaling: Scaling, size: int) -> None:
    scaling.results(size, fail_at(0, "gradient", 4, action="kill_all"))
    scaling.calls.clear()
    scaling.entries.clear()


def test_they_are_called_when_a_durable_commit_is_resumed_with_another_number_of_ranks() -> None:
    scaling = Scaling(URL)
    killed(scaling, 2)
    assert scaling.results(3) == [pytest.approx(0.3)] * 3
    assert sorted(scaling.calls) == [(rank, 3, 2, (rank, 3)) for rank in range(3)]
    assert sorted(scaling.entries) == [(rank, 3, 2, 0.3) for rank in range(3)]
