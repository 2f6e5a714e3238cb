"""The slowdown of training steps while a commit is being written."""

from __future__ import annotations

import statistics
import time

import horovod.torch as hvd
import torch

import hvdrecover.torch as recover
from benchmarks.measure import let_clean_up, stopwatch
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting, Training

_STEP_SECONDS = 0.03
_WIDTH = 1024


def measure(setting: Setting) -> list[Row]:
    """Steps that keep the processor busy, in blocks with and without a write in flight by turns."""
    hvd.init()
    training = Training(setting.shape, trained=True)
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        checkpoint=recover.Checkpoint(str(setting.folder / "root")),
    )
    state.sync()
    cores = torch.get_num_threads()
    rows = []
    for threads, goal in ((cores, Goal(0.05, 0.02, slowdown=True, digits=3)), (max(1, cores - 1), None)):
        torch.set_num_threads(threads)
        work = Work(_STEP_SECONDS if setting.size == "full" else 1e-4)
        during, without = _blocks(training, state, work, setting.rounds(20))
        rows.append(
            Row(
                "slowdown",
                f"a training step while a write is in flight, {threads} of {cores} cores computing",
                setting.shape.title,
                "ms",
                during,
                "the same without",
                without,
                goal,
            )
        )
    torch.set_num_threads(cores)
    return rows


class Work:
    """Matrix products that keep all of torch's threads busy for a set time, as steps of training do.

    Args:
        seconds: how long one call is to take.
    """

    def __init__(self, seconds: float) -> None:
        self._matrix = torch.rand(_WIDTH, _WIDTH)
        self._count = 1
        for _ in range(3):
            once = statistics.median(stopwatch(self) for _ in range(5)) / self._count
            self._count = max(1, round(seconds / once))

    def __call__(self) -> None:
        """Do it once."""
        for _ in range(self._count):
            torch.mm(self._matrix, self._matrix)


def _blocks(
    training: Training, state: recover.TorchState, work: Work, rounds: int
) -> tuple[list[float], list[float]]:
    """Milliseconds of each step, with and without a write in flight."""
    during: list[float] = []
    without: list[float] = []
    for number in range(rounds + 1):
        training.step()
        state.commit()
        written, block = state.last_commit, []
        while state.last_durable != written or not block:
            block.append(1e3 * stopwatch(work))
        block = block[: max(1, len(block) - 1)]  # the write ended somewhere in the last
        let_clean_up(state)
        time.sleep(0.05)
        after = [1e3 * stopwatch(work) for _ in block]
        if number:  # the first is for warming up
            during += block
            without += after
    return during, without
