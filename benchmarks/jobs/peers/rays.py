"""The job by Ray Train: its controller starts all workers again, and they read what was reported."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ray.train
import torch.distributed as dist

from benchmarks.jobs.peers.files import File
from benchmarks.jobs.peers.loop import SHAPE
from benchmarks.jobs.peers.torchs import resumed, run
from benchmarks.states import Training


def by_ray(steps: Path, checkpoint: Path) -> None:
    """By ``torch.save`` of rank 0, reported as a checkpoint, which Ray copies to below `checkpoint`."""
    training, rank, number = Training(SHAPE, trained=False), dist.get_rank(), 0
    if kept := ray.train.get_checkpoint():
        with kept.as_directory() as folder:
            if saved := File(Path(folder)).load():
                number = resumed(training, saved)

    def keep(number: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            reported = None
            if rank == 0:
                File(Path(folder)).save({**training.tree(), "step": number})
                reported = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({"step": number}, checkpoint=reported)

    run(rank, steps, training, number, keep)
