"""Training with torch, without an end, that survives a lost worker in one of three ways."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.jobs.peers.files import File
from benchmarks.jobs.steps import Steps
from benchmarks.jobs.training import BATCH, CLASSES, COMMIT_EVERY, FEATURES, WIDTH, Orders, orders


class Training:
    """The network and its batch."""

    def __init__(self, rank: int) -> None:
        torch.manual_seed(1)
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(FEATURES, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, CLASSES),
        )
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters())
        source = torch.Generator().manual_seed(rank)
        self._images = torch.rand(BATCH, FEATURES, generator=source)
        self._labels = torch.randint(CLASSES, (BATCH,), generator=source)

    def step(self) -> None:
        """One step of training."""
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self._images), self._labels).backward()
        self.optimizer.step()


def by_hvdrecover(given: Orders) -> None:
    """By hvdrecover's state and loop."""
    import horovod.torch as hvd

    import hvdrecover.torch as recover

    hvd.init()
    training, steps = _horovods(hvd), Steps(given.steps)
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        step=0,
        checkpoint=None if given.checkpoint is None else os.fspath(given.checkpoint),
    )

    @recover.run
    def train(state: recover.TorchState) -> None:
        while True:
            training.step()
            state.step += 1
            steps.done(hvd.rank(), state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)


def by_horovod(given: Orders) -> None:
    """By Horovod's own state and loop."""
    import horovod.torch as hvd
    from horovod.torch.elastic import TorchState, run

    hvd.init()
    training, steps = _horovods(hvd), Steps(given.steps)
    state = TorchState(model=training.model, optimizer=training.optimizer, step=0)

    @run
    def train(state: TorchState) -> None:
        while True:
            training.step()
            state.step += 1
            steps.done(hvd.rank(), state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)


def by_torchrun(given: Orders) -> None:
    """By a checkpoint that is read again when ``torchrun`` has started all workers again."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training, steps = Training(rank), Steps(given.steps)
    assert given.checkpoint is not None
    file, number = File(given.checkpoint), 0
    if saved := file.load():
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        number = saved["step"]
    network, training.model = training.model, DistributedDataParallel(training.model)
    while True:
        training.step()
        number += 1
        steps.done(rank, number)
        if number % COMMIT_EVERY == 0 and rank == 0:
            file.save(
                {
                    "model": network.state_dict(),
                    "optimizer": training.optimizer.state_dict(),
                    "step": number,
                }
            )


def _horovods(hvd: Any) -> Training:
    training = Training(hvd.rank())
    training.optimizer = hvd.DistributedOptimizer(
        training.optimizer, named_parameters=training.model.named_parameters()
    )
    return training


WAYS = {"hvdrecover": by_hvdrecover, "horovod": by_horovod, "torchrun": by_torchrun}

if __name__ == "__main__":
    given = orders(tuple(WAYS))
    torch.set_num_threads(1)
    WAYS[given.way](given)
