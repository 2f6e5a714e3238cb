"""The job by what torch brings: ``torchrun`` starts all workers again, and they read a checkpoint."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.jobs.peers.files import File
from benchmarks.jobs.peers.loop import SHAPE, Loop, not_here
from benchmarks.states import Training


def by_torch_save(steps: Path, checkpoint: Path) -> None:
    """By ``torch.save`` of rank 0."""
    training, rank = distributed()
    file, number = File(checkpoint), 0
    if saved := file.load():
        number = resumed(training, saved)

    def keep(number: int) -> None:
        file.save({**training.tree(), "step": number})

    run(rank, steps, training, number, keep if rank == 0 else not_here)


def by_dcp(steps: Path, checkpoint: Path) -> None:
    """By ``async_save`` of rank 0, one at a time; with a stager that is kept, as that is the fastest."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    training, rank = distributed(trained=True)  # loading is in place: the optimizer needs its state
    finished = sorted(checkpoint.glob("*/.metadata"))  # which is written last
    number = 0
    if finished:
        tree = {**training.tree(), "step": 0}
        dcp.load(tree, checkpoint_id=finished[-1].parent, no_dist=True)
        number = resumed(training, tree)
    stager = DefaultStager(StagingOptions(False, False, False, False))
    kept = [path.parent for path in finished]
    writing: list[Future[object]] = []

    def keep(number: int) -> bool:
        if writing:
            if not writing[0].done():
                return False
            writing.pop().result()
            for path in kept[:-1]:
                shutil.rmtree(path)
            del kept[:-1]
        kept.append(checkpoint / f"{number:08}")
        tree = {**training.tree(), "step": number}
        writing.append(dcp.async_save(tree, checkpoint_id=kept[-1], no_dist=True, async_stager=stager))  # type: ignore[arg-type]
        return True

    run(rank, steps, training, number, keep if rank == 0 else not_here)


def distributed(*, trained: bool = False) -> tuple[Training, int]:
    """Return the training and the rank of this process, which is connected to the others."""
    dist.init_process_group("gloo")
    return Training(SHAPE, trained=trained), dist.get_rank()


def resumed(training: Training, saved: dict[str, Any]) -> int:
    """Return the number of the last step, when the training has taken up what was saved after it."""
    training.model.load_state_dict(saved["model"])
    training.optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def run(rank: int, steps: Path, training: Training, number: int, keep: Any) -> None:
    """Train without an end, on ranks that wait for each other; see `Loop.run`."""

    def average() -> None:
        flat = flattened(training)
        dist.all_reduce(flat)
        spread(training, flat / dist.get_world_size())

    Loop(lambda: rank, steps, training).run(number, average, dist.barrier, keep)


def flattened(training: Training) -> torch.Tensor:
    """Return all gradients in one tensor."""
    return torch.cat([parameter.grad.view(-1) for parameter in training.model.parameters()])  # type: ignore[union-attr]


def spread(training: Training, flat: torch.Tensor) -> None:
    """Make the parts of one tensor the gradients."""
    start = 0
    for parameter in training.model.parameters():
        end = start + parameter.numel()
        parameter.grad = flat[start:end].view_as(parameter)
        start = end
