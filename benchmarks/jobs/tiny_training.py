"""Training of a model of a few KB without an end, of which many processes fit on one machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
from benchmarks.jobs.steps import Steps
from benchmarks.jobs.training import Orders, orders

COMMIT_EVERY = 5  # steps
_PAUSE = 0.02  # seconds in each step, which leave the processors to the others
_WIDTH = 16


def train(given: Orders) -> None:
    """Train; rank 0 notes how long its commits take."""
    hvd.init()
    torch.manual_seed(1)
    bare = torch.nn.Linear(_WIDTH, _WIDTH)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(bare.parameters(), 1e-3), bare.named_parameters())
    steps, inputs = Steps(given.steps), torch.ones(1, _WIDTH)
    state = recover.TorchState(model=bare, optimizer=optimizer, step=0)

    @recover.run
    def loop(state: recover.TorchState) -> None:
        while True:
            optimizer.zero_grad()
            bare(inputs).sum().backward()
            optimizer.step()
            time.sleep(_PAUSE)
            state.step += 1
            steps.done(hvd.rank(), state.step)
            if state.step % COMMIT_EVERY == 0:
                began = time.perf_counter()
                state.commit()
                _note(given.steps, time.perf_counter() - began)

    loop(state)


def commits(steps: Path) -> list[float]:
    """Seconds of rank 0's commits."""
    lines = (line for path in steps.glob("*.commits") for line in path.read_text().splitlines())
    return [float(line) for line in lines]


def _note(steps: Path, seconds: float) -> None:
    if hvd.rank() == 0:
        with (steps / f"{os.getpid()}.commits").open("a") as file:
            file.write(f"{seconds}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(orders(("hvdrecover",)))
