"""Training with a small state that is kept in memory each step, by hvdrecover and by its peers."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.jobs.steps import Steps
from benchmarks.states import Shape, Training

SHAPE = Shape(8, 288)  # 8 MB
STEP_SECONDS = 0.05
_EVERY_SECONDS = 60.0  # between durable commits
_FLUSH_STEPS = 5  # between writes of lm-resiliency, whose memory is that of the training processes


class Loop:
    """Steps of a set length, written down with how long it takes to keep each.

    Args:
        rank: of this process.
        folder: where to write.
        training: what is trained.
    """

    def __init__(self, rank: int, folder: Path, training: Training) -> None:
        self._rank = rank
        self._steps = Steps(folder)
        self._stalls = (folder / f"{os.getpid()}.stalls").open("a", buffering=1)
        self._training = training

    def run(
        self,
        number: int,
        average: Callable[[], object],
        align: Callable[[], object],
        keep: Callable[[int], object],
    ) -> None:
        """Train without an end.

        Args:
            number: of the last step that was done.
            average: averages the gradients.
            align: waits for the other ranks, which is not to count for what follows.
            keep: keeps the state after a step.
        """
        while True:
            until = time.monotonic() + STEP_SECONDS
            self._training.model(torch.ones(1, SHAPE.width)).sum().backward()
            average()
            self._training.optimizer.step()
            self._training.optimizer.zero_grad(set_to_none=False)
            time.sleep(max(0.0, until - time.monotonic()))
            number += 1
            self._steps.done(self._rank, number)
            align()
            started = time.perf_counter()
            keep(number)
            self._stalls.write(f"{1e3 * (time.perf_counter() - started)}\n")


def by_hvdrecover(steps: Path, checkpoint: Path) -> None:
    """By hvdrecover's state and loop."""
    import horovod.torch as hvd

    import hvdrecover.torch as recover

    hvd.init()
    training = Training(SHAPE, trained=False)
    loop = Loop(hvd.rank(), steps, training)
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        step=0,
        checkpoint=recover.Checkpoint(str(checkpoint), every_seconds=_EVERY_SECONDS),
    )

    @recover.run
    def train(state: recover.TorchState) -> None:
        def average() -> None:
            gradients = [parameter.grad for parameter in training.model.parameters()]
            hvd.synchronize(hvd.grouped_allreduce_async_(gradients, name="gradients"))

        def keep(number: int) -> None:
            state.step = number
            state.commit()

        loop.run(state.step, average, hvd.barrier, keep)

    train(state)


def by_dlrover(steps: Path, checkpoint: Path) -> None:
    """By dlrover's flash checkpoint, in the shared memory of its agent."""
    import torch.distributed as dist
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    training, rank = _distributed()
    checkpointer = DdpCheckpointer(os.fspath(checkpoint))
    saved, number = checkpointer.load_checkpoint(), 0
    if saved:
        saved = saved.get("model_states", saved)
        training.model.load_state_dict(saved["model"])
        training.optimizer.load_state_dict(saved["optimizer"])
        number = saved["step"]

    def keep(number: int) -> None:
        tree = {**training.tree(), "step": number}
        checkpointer.save_checkpoint(number, tree, storage_type=StorageType.MEMORY)

    Loop(rank, steps, training).run(number, lambda: _average(training), dist.barrier, keep)


def by_lm_resiliency(steps: Path, checkpoint: Path) -> None:
    """By lm-resiliency's checkpoints, in the memory of both ranks; its hook saves in ``optimizer.step``."""
    import torch.distributed as dist
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    training, rank = _distributed()
    group = dist.new_group(backend="gloo")
    session: Any = enable_resiliency(
        training.model,
        training.optimizer,
        interval=1,
        enable_detection=False,
        checkpoint=InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=_FLUSH_STEPS,
            disk_folder=os.fspath(checkpoint),
            run_id="benchmark",
            verify_integrity=True,
            pin_memory=False,
        ),
        group=group,
        nccl_group=group,
        device=torch.device("cpu"),
    )
    loop = Loop(rank, steps, training)
    loop.run(session.step_count, lambda: _average(training), dist.barrier, lambda number: None)


def _distributed() -> tuple[Training, int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return Training(SHAPE, trained=False), dist.get_rank()


def _average(training: Training) -> None:
    import torch.distributed as dist

    flat = torch.cat([parameter.grad.view(-1) for parameter in training.model.parameters()])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    start = 0
    for parameter in training.model.parameters():
        end = start + parameter.numel()
        parameter.grad = (flat[start:end] / dist.get_world_size()).view_as(parameter)
        start = end


WAYS = {"hvdrecover": by_hvdrecover, "dlrover": by_dlrover, "lm-resiliency": by_lm_resiliency}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=tuple(WAYS))
    parser.add_argument("steps", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    WAYS[given.way](given.steps, given.checkpoint)
