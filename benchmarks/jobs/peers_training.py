"""Training with a small state that is kept after each step, by hvdrecover or by one of its peers."""

from __future__ import annotations

import importlib

import torch

from benchmarks.jobs.training import orders

# Each in a module of those that import the same, as a peer's imports are part of its recovery.
WAYS = {
    "hvdrecover": "horovods",
    "horovod": "horovods",
    "torch_save": "torchs",
    "dcp": "torchs",
    "dlrover": "in_memory",
    "lm_resiliency": "in_memory",
    "torchft": "in_memory",
    "ray": "rays",
}


def main(words: list[str] | None = None) -> None:
    """Train as a command line says; by default that of this process."""
    given = orders(tuple(WAYS), words)
    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.jobs.peers.{WAYS[given.way]}")
    getattr(module, f"by_{given.way}")(given.steps, given.checkpoint)


if __name__ == "__main__":
    main()
