"""Training with a large state, without an end, whose steps are short beside what a recovery moves."""

from __future__ import annotations

from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
from benchmarks.jobs.near_state import kept
from benchmarks.jobs.steps import Steps
from benchmarks.jobs.training import orders
from benchmarks.states import SHAPES, Training


def train(size: str, steps: Path, checkpoint: Path) -> None:
    """Commit each step; only the last layer is trained, so that gradients of the others take no time."""
    hvd.init()
    shape = SHAPES[size]["large"]
    training, done, batch = Training(shape, trained=False), Steps(steps), torch.ones(1, shape.width)
    last = list(training.model[-1].parameters())
    state = kept(training, checkpoint)

    @recover.run
    def loop(state: recover.TorchState) -> None:
        if state.step == 0:
            training.step()  # gives the optimizer all of its state
        training.model.requires_grad_(False)
        for parameter in last:
            parameter.requires_grad_(True)
        while True:
            training.model(batch).sum().backward()
            gradients = [parameter.grad for parameter in last]
            hvd.synchronize(hvd.grouped_allreduce_async_(gradients, name="gradients"))
            training.optimizer.step()
            training.optimizer.zero_grad()
            state.step += 1
            done.done(hvd.rank(), state.step)
            state.commit()

    loop(state)


if __name__ == "__main__":
    given = orders(tuple(SHAPES))
    assert given.checkpoint is not None
    torch.set_num_threads(1)
    train(given.way, given.steps, given.checkpoint)
