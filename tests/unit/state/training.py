"""A small training run on numpy arrays, for comparing runs to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.state.random import Randomness
from hvdrecover.state.run import run
from hvdrecover.state.state import State
from tests.fakes.framework import FakeLoader, FakeModel, FakeOptimizer, FakeSampler
from tests.fakes.world import FakeWorld
from tests.support.ledger import Batch
from tests.unit.state.jobs import Process, initialised


@dataclass
class Training:
    """A script: noisy gradients, momentum, a new iterator in each epoch, and a commit now and then.

    Attributes:
        checkpoint: the checkpoint root, or None.
        commit_every: steps from one commit to the next.
        check_every: steps from one look at the hosts to the next.
        flush: wait for each commit to be durable, so that a kill finds it so.
        batches: all batches that were trained on, by all ranks.
        starts: generation to the commit that it resumed from.
        job: how many jobs came before this one. A generation that was agreed on but never written is used
            again by the next job, so ``batches`` and ``starts`` count 1000 generations to each job.
        calls: how often the training function was called, on all ranks together.
    """

    checkpoint: Checkpoint | str | None = None
    rng: Randomness = "reseed"
    commit_every: int = 2
    check_every: int = 10**9
    flush: bool = False
    samples: int = 10
    epochs: int = 2
    batch_size: int = 2
    callbacks: Callable[[State, FakeWorld], list[Callable[[], None]]] | None = None
    batches: list[Batch] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    job: int = 0

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
        if self.callbacks is not None:
            state.register_reset_callbacks(self.callbacks(state, process.world))
        train = run(lambda state: self._train(process, state))
        train(state)
        return final(process, state)

    def _train(self, process: Process, state: State) -> None:
        self.calls += 1
        self.starts[self._generation(state)] = state.last_commit.commit
        loader = FakeLoader(state.sampler, self.batch_size, process.generator)
        while state.epoch < self.epochs:
            state.sampler.order.set_epoch(state.epoch)
            for batch in loader:
                self._step(process, state, batch)
            state.epoch += 1

    def _step(self, process: Process, state: State, batch: list[int]) -> None:
        self._note(process.world, state, batch)
        gradients = _gradients(process, state.model, batch)
        summed = process.world.allreduce(gradients)
        state.optimizer.step({"w": summed[:3] / process.world.size(), "b": summed[3] / process.world.size()})
        state.sampler.order.record(len(batch))
        state.step += 1
        state.history.append(float(summed[3]))
        if state.step % self.check_every == 0:
            state.check_host_updates()
        if state.step % self.commit_every == 0:
            state.commit()
            if self.flush:
                state.flush()

    def _note(self, world: FakeWorld, state: State, batch: list[int]) -> None:
        after = self._generation(state), state.last_commit.commit
        self.batches.append(Batch(0.0, 0, world.rank(), world.size(), *after, state.epoch, tuple(batch)))

    def _generation(self, state: State) -> int:
        return 1000 * self.job + state.last_commit.generation


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
