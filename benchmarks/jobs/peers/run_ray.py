"""The launcher of Ray Train's workers: a Ray of this job's own, and a trainer."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path

import ray
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks.jobs.peers.environment import RAY_FOLDERS

_MEMORY = 80_000_000  # bytes of the object store, the least that Ray takes; nothing of this job goes there


def _train(given: dict[str, list[str]]) -> None:
    """Train in a worker of Ray's, which has its process group already."""
    module, *words = given["command"]
    importlib.import_module(module).main(words)


def main(workers: int, command: list[str]) -> None:
    """Train until this process is killed.

    Args:
        workers: how many processes train.
        command: module and arguments of the training, those of its checkpoint root last.
    """
    folder = tempfile.mkdtemp(prefix=RAY_FOLDERS.name, dir=RAY_FOLDERS.parent)
    ray.init(
        num_cpus=workers,
        include_dashboard=False,
        object_store_memory=_MEMORY,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    TorchTrainer(
        _train,
        train_loop_config={"command": command},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            storage_path=os.fspath(Path(command[-1]).resolve()),
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
