"""The state of jobs that rely on the near tier: a commit each step, rarely a durable one."""

from __future__ import annotations

import os
from pathlib import Path

import hvdrecover.torch as recover
from benchmarks.states import Training

EVERY_SECONDS = 60.0  # between durable commits


def kept(training: Training, checkpoint: Path) -> recover.TorchState:
    """Return the state of a training, with the number of its last step."""
    return recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        step=0,
        checkpoint=recover.Checkpoint(os.fspath(checkpoint), every_seconds=EVERY_SECONDS),
    )
