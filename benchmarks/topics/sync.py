"""The time that it takes to bring a worker that has just started to the state of the others.

The module is also the worker: ``horovodrun -np 2 python -m benchmarks.topics.sync SIZE STATE FOLDER``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.elastic import TorchState as HorovodState

import hvdrecover.torch as recover
from benchmarks import workers
from benchmarks.measure import Reserve, by_turns, stopwatch
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting, Training

_PATIENCE = 300.0  # seconds
_GOALS = {"large": Goal(1.0, 0.8), "many": Goal(0.5, 0.2)}
_RESULT = "sync.json"


def measure(setting: Setting) -> list[Row]:
    """`TorchState.sync` against Horovod's, between two real workers over loopback."""
    workers.run("benchmarks.topics.sync", setting, _PATIENCE)
    ours, theirs = json.loads((setting.folder / _RESULT).read_text())
    what, peer = "sync of a new worker over loopback", "Horovod's TorchState.sync()"
    return [Row("sync", what, setting.shape.title, "ms", ours, peer, theirs, _GOALS[setting.state])]


def work(setting: Setting) -> None:
    """One of the workers: rank 0 has trained, and rank 1 is new each time."""
    hvd.init()
    new = hvd.rank() != 0
    training = Training(setting.shape, trained=not new)
    states = {make: make(training) for make in (_ours, _theirs)}
    del training
    states[_ours].sync()  # from now on rank 0 has a commit
    # The one that has trained needs no new memory.
    reserve = Reserve(2 * setting.shape.nbytes if new else 0)

    def take(make: Callable[[Training], Any]) -> float:
        if new:
            states.clear()
            states[make] = make(Training(setting.shape, trained=False))
        with reserve.freed():
            hvd.barrier()
            mine = torch.tensor([stopwatch(states[make].sync)], dtype=torch.float64)
        return 1e3 * float(hvd.allgather(mine, name=make.__name__).max())

    values = by_turns(setting.rounds(4), [lambda: take(_ours), lambda: take(_theirs)])
    if not new:
        (setting.folder / _RESULT).write_text(json.dumps(values))


def _ours(training: Training) -> recover.TorchState:
    return recover.TorchState(model=training.model, optimizer=training.optimizer, batch=0)


def _theirs(training: Training) -> HorovodState:
    return HorovodState(model=training.model, optimizer=training.optimizer, batch=0)


if __name__ == "__main__":
    work(Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
