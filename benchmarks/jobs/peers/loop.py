"""The training that is the same under each peer: a small state, steps of a set length."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.jobs.steps import Steps
from benchmarks.states import Shape, Training

SHAPE = Shape(8, 288)  # 8 MB
STEP_SECONDS = 0.05


def nothing() -> None:
    """Do nothing, for those that have nothing to do at some point of a step."""


def not_here(number: int) -> bool:
    """Return that this rank keeps nothing, as another one does."""
    return False


class Loop:
    """Steps of a set length, written down with how long it takes to keep each."""

    def __init__(self, rank: Callable[[], int], folder: Path, training: Training) -> None:
        self._rank = rank
        self._steps = Steps(folder)
        self._stalls = (folder / f"{os.getpid()}.stalls").open("a", buffering=1)
        self._training = training

    def run(
        self,
        number: int,
        average: Callable[[], object],
        align: Callable[[], object],
        keep: Callable[[int], object] | None,
        counted: Callable[[int], int] = lambda number: number + 1,
    ) -> None:
        """Train without an end.

        Args:
            number: of the last step that was done.
            average: averages the gradients.
            align: waits for the other ranks, which is not to count for what follows.
            keep: keeps the state after a step; False if it has kept nothing this time. None if the optimizer
                does so in its step, whose stall can't be told from that step then.
            counted: the number of the last step that was done, after one more, given the one before; the
                same if that step was given up.
        """
        batch = torch.ones(1, SHAPE.width)
        while True:
            until = time.monotonic() + STEP_SECONDS
            self._training.optimizer.zero_grad(set_to_none=False)
            self._training.model(batch).sum().backward()
            average()
            self._training.optimizer.step()
            time.sleep(max(0.0, until - time.monotonic()))
            before, number = number, counted(number)
            if number == before:
                continue
            self._steps.done(self._rank(), number)
            if keep is None:
                continue
            align()
            started = time.perf_counter()
            if keep(number) is not False:
                self._stalls.write(f"{1e3 * (time.perf_counter() - started)}\n")
