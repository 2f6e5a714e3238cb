"""The job by those that keep the state in memory: of an agent, or of the other ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.jobs.peers.files import File
from benchmarks.jobs.peers.loop import SHAPE, Loop, not_here, nothing
from benchmarks.jobs.peers.torchs import distributed, flattened, resumed, run, spread
from benchmarks.states import Training

_FLUSH_STEPS = 5  # between writes of lm-resiliency, whose memory is that of the training processes
_WAIT = timedelta(seconds=10)  # of torchft, for a collective: Horovod's limit here


def by_dlrover(steps: Path, checkpoint: Path) -> None:
    """By dlrover's flash checkpoint, in the shared memory of its agent."""
    from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

    training, rank = distributed()
    checkpointer, number = DdpCheckpointer(os.fspath(checkpoint)), 0
    if saved := checkpointer.load_checkpoint():
        number = resumed(training, saved.get("model_states", saved))

    def keep(number: int) -> None:
        tree = {**training.tree(), "step": number}
        checkpointer.save_checkpoint(number, tree, storage_type=StorageType.MEMORY)

    run(rank, steps, training, number, keep)


def by_lm_resiliency(steps: Path, checkpoint: Path) -> None:
    """By lm-resiliency's checkpoints, in the memory of both ranks; its hook saves in ``optimizer.step``."""
    from lm_resiliency import InMemoryCkptConfig, enable_resiliency

    training, rank = distributed()
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
    run(rank, steps, training, session.step_count, None)


def by_torchft(steps: Path, checkpoint: Path) -> None:
    """By torchft's manager: the other replica trains on, and the new one gets its state.

    Its hook of DDP ends the survivor on Gloo, so gradients go through `Manager.allreduce` as one tensor. The
    state is gone with the last replica; its documents have scripts write checkpoints against that.
    """
    import torchft

    rank = int(os.environ["REPLICA_GROUP_ID"])
    training, file = Training(SHAPE, trained=False), File(checkpoint)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_WAIT),
        load_state_dict=lambda saved: resumed(training, saved),
        state_dict=lambda: {**training.tree(), "step": 0},
        min_replica_size=1,
        replica_id=f"replica_{rank}",
        hostname="localhost",
        timeout=_WAIT,
    )
    if saved := file.load():
        resumed(training, saved)
        manager.load_state_dict(saved["manager"])
    training.optimizer = torchft.Optimizer(manager, training.optimizer)

    def average() -> None:
        flat = flattened(training)
        manager.allreduce(flat).wait()
        spread(training, flat)

    def keep(number: int) -> None:
        file.save({**training.tree(), "step": number, "manager": manager.state_dict()})

    Loop(lambda: rank, steps, training).run(
        manager.current_step(),
        average,
        nothing,
        keep if rank == 0 else not_here,
        lambda _: manager.current_step(),
    )
