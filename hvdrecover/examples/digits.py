"""The common part of the digits examples: the data and the options."""

from __future__ import annotations

import argparse
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

TEST_SAMPLES = 360


class Digits(NamedTuple):
    """Scikit-learn's handwritten digits.

    Attributes:
        images: float32 of shape ``[N, 64]``, from 0 to 1.
        labels: int64 of shape ``[N]``.
        indices: int64 of shape ``[N]``, the samples' own numbers.
    """

    images: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]


def digits() -> tuple[Digits, Digits]:
    """1,437 samples to train with, and 360 to test with."""
    # As load_digits() does; but to import scikit-learn takes a second, whenever a process starts.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(file), delimiter=",")
    images = (table[:, :-1] / 16).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    indices = np.arange(len(images))
    train, test = slice(None, -TEST_SAMPLES), slice(-TEST_SAMPLES, None)
    return (
        Digits(images[train], labels[train], indices[train]),
        Digits(images[test], labels[test], indices[test]),
    )


def options(framework: str, description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line of one of the examples."""
    parser = argparse.ArgumentParser(
        prog=f"python -m hvdrecover.examples.{framework}_digits", description=description
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--checkpoint", metavar="URL", help="checkpoint root; default: HVDRECOVER_CHECKPOINT, or none"
    )
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="samples in one worker's batch")
    parser.add_argument(
        "--virtual-ranks",
        type=int,
        metavar="N",
        help="have the work of N virtual ranks done, by however many workers there are",
    )
    parser.add_argument("--commit-every", type=int, default=5, metavar="BATCHES")
    adam = "adamw" if framework == "torch" else "adam"
    parser.add_argument("--optimizer", choices=(adam, "sgd"), default=adam)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="pretend that a step takes this much longer"
    )
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the final weights here")
    parser.add_argument(
        "--ledger", type=Path, metavar="FOLDER", help="write down each batch here, for the demo and tests"
    )
    if framework == "torch":
        parser.add_argument(
            "--loader-workers", type=int, default=0, help="processes that load data, per worker"
        )
    else:
        parser.add_argument("--fit", action="store_true", help="train by model.fit, not in a loop of its own")
    return parser.parse_args(arguments)
