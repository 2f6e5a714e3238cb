"""A small training run on numpy arrays, for comparing runs to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.state.random import Randomness
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeLoader, FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import FakeWorld
from tests.unit.state.jobs import Process, initialised


@dataclass
class Training:
    """A script: noisy gradients, momentum, a new iterator in each epoch, and a commit now and then.

    Attributes:
        checkpoint: the checkpoint root, or None.
        commit_every: steps from one commit to the next.
        flush: wait for each commit to be durable, so that a kill finds it so.
    """

    checkpoint: Checkpoint | str | None = None
    rng: Randomness = "reseed"
    commit_every: int = 2
    flush: bool = False
    samples: int = 10
    epochs: int = 2
    batch_size: int = 2

    def __call__(self, world: FakeWorld) -> Any:
        return initialised(self._script)(world)

    def _script(self, process: Process) -> dict[str, Any]:
        model = FakeModel(w=[0.5, -0.25, 0.125], b=0.1)
        sampler = FakeSampler(self.samples, seed=3)
        state = process.state(
            self.checkpoint,
            rng=self.rng,
            model=model,
            optimizer=FakeOptimizer(model),
            sampler=sampler,
            epoch=0,
            step=0,
            history=[],
        )
        train = run(lambda state: self._train(process, state))
        train(state)
        return final(process, state)

    def _train(self, process: Process, state: State) -> None:
        loader = FakeLoader(state.sampler, self.batch_size, process.generator)
        while state.epoch < self.epochs:
            state.sampler.order.set_epoch(state.epoch)
            for batch in loader:
                self._step(process, state, batch)
            state.epoch += 1

    def _step(self, process: Process, state: State, batch: list[int]) -> None:
        gradients = _gradients(process, state.model, batch)
        summed = process.world.allreduce(gradients)
        state.optimizer.step({"w": summed[:3] / process.world.size(), "b": summed[3] / process.world.size()})
        state.sampler.order.record(len(batch))
        state.step += 1
        state.history.append(float(summed[3]))
        if state.step % self.commit_every == 0:
            state.commit()
            if self.flush:
                state.flush()


def _gradients(process: Process, model: FakeModel, batch: list[int]) -> np.ndarray[Any, Any]:
    """Of a made-up loss with dropout: float64 of shape [4], for ``w`` and ``b``."""
    total = np.zeros(4)
    for index in batch:
        features = np.sin(np.arange(1.0, 4.0) * (index + 1))
        kept = np.array([process.generator.uniform() < 0.8 for _ in range(3)])
        error = np.tanh(np.sum(model.weights["w"] * features * kept) + model.weights["b"]) - index / 10
        total += error * np.append(features * kept, 1.0)
    return total


def final(process: Process, state: State) -> dict[str, Any]:
    """All that must be equal, to the last bit, whatever has happened to a run."""
    return {
        "w": state.model.weights["w"].tobytes(),
        "b": state.model.weights["b"].tobytes(),
        "velocity": {name: array.tobytes() for name, array in state.optimizer.velocity.items()},
        "cursor": (state.sampler.order.epoch, state.sampler.order.done),
        "generator": process.generator.state,
        "counters": (state.epoch, state.step, state.last_commit.commit),
        "history": list(state.history),
    }
