"""The common part of the digits examples: the data, the options, and the record of samples."""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

TEST_SAMPLES = 360


class Digits(NamedTuple):
    images: npt.NDArray[np.float32]  # of shape [N, 64], from 0 to 1
    labels: npt.NDArray[np.int64]  # of shape [N]
    indices: npt.NDArray[np.int64]  # of shape [N], the numbers of the samples


def digits() -> tuple[Digits, Digits]:
    """Return 1,437 samples for training, and 360 for the test."""
    # As load_digits() does. Importing scikit-learn would take each process another second.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",")
    images, labels = (table[:, :-1] / 16).astype(np.float32), table[:, -1].astype(np.int64)
    indices, n = np.arange(len(images)), -TEST_SAMPLES
    return Digits(images[:n], labels[:n], indices[:n]), Digits(images[n:], labels[n:], indices[n:])


def options(framework: str, description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m hvdrecover.examples.{framework}_digits",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--checkpoint", metavar="URL", help="checkpoint root; default: HVDRECOVER_CHECKPOINT, or none")
    add("--epochs", type=int, default=10)
    add("--batch-size", type=int, default=16, help="samples in one rank's batch")
    add("--virtual-ranks", type=int, metavar="N", help="train with N virtual ranks")
    add("--commit-every", type=int, default=5, metavar="BATCHES")
    adam = "adamw" if framework == "torch" else "adam"
    add("--optimizer", choices=(adam, "sgd"), default=adam)
    add("--step-seconds", type=float, default=0.0, help="sleep this long after each step")
    add("--save", type=Path, metavar="FILE", help="write the final weights to this file")
    add("--ledger", type=Path, metavar="FOLDER", help="record the samples of each batch here, for tests")
    if framework == "torch":
        add("--loader-workers", type=int, default=0, help="processes that load data, for each rank")
    else:
        add("--fit", action="store_true", help="train by model.fit instead of a training loop")
    return parser.parse_args(arguments)


class Ledger:
    """Writes the samples of this process's batches to its own file, a line of JSON for each batch.

    Tests check by it that no sample is lost or repeated.
    """

    def __init__(self, folder: Path | None, state: Any) -> None:
        self._folder = folder  # with None, nothing is written
        self._state = state
        self._file: TextIO | None = None

    def batch(self, rank: int, size: int, indices: Sequence[int]) -> None:
        """Record a batch of the state's epoch, before the commit that makes it count."""
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = (self._folder / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("a", buffering=1)
        last = self._state.last_commit
        when = [time.time(), os.getpid(), rank, size, last.generation, last.commit, self._state.epoch]
        self._file.write(json.dumps([*when, list(indices)]) + "\n")
