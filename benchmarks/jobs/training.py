"""The training of all frameworks: two hidden layers, on one made-up batch per rank."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

FEATURES = 64
WIDTH = 1024
CLASSES = 10
BATCH = 256  # a step is some 25 ms on one core
COMMIT_EVERY = 5  # steps
TITLE = "14 MB, Adam"  # of parameters and moments


@dataclass(frozen=True)
class Orders:
    """The command line of a training program."""

    # how it survives: by `hvdrecover`, by plain `horovod`, by `torchrun` and so on; or, for the training with
    # a large state, its size, `full` or `small`
    way: str
    steps: Path  # folder for what was done
    checkpoint: Path | None  # folder for checkpoints, or None for none


def orders(ways: tuple[str, ...], words: list[str] | None = None) -> Orders:
    """Read a command line; by default that of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=ways)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--checkpoint", type=Path)
    given = parser.parse_args(words)
    return Orders(given.way, given.steps, given.checkpoint)
