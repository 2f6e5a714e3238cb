"""The host memory that commits hold."""

from __future__ import annotations

import horovod.torch as hvd

import hvdrecover.torch as recover
from benchmarks.measure import PeakMemory, resident
from benchmarks.rows import MEMORY, Goal, Row
from benchmarks.states import Setting, Shape, Training


def measure(setting: Setting) -> list[Row]:
    """Memory beyond that of the training itself, as multiples of the state."""
    hvd.init()
    _commit_beside_a_write(_joined(Training(Shape(1, 8), trained=True), setting, "first"))  # loads code
    training = Training(setting.shape, trained=True)
    training.step()
    before = resident()
    state = _joined(training, setting, "root")
    idle, in_flight = [], []
    for _ in range(setting.rounds(3)):
        training.nudge()
        peak = PeakMemory()
        _commit_beside_a_write(state)
        in_flight.append((peak.nbytes() - before) / training.nbytes)
        idle.append((resident() - before) / training.nbytes)
    title, goals = setting.shape.title, (Goal(1.0, 1.0), Goal(2.0, 2.0))
    return [
        Row("memory", "extra memory when idle", title, MEMORY, idle, goal=goals[0]),
        Row("memory", "extra memory, a commit beside a write", title, MEMORY, in_flight, goal=goals[1]),
    ]


def _joined(training: Training, setting: Setting, name: str) -> recover.TorchState:
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        batch=0,
        checkpoint=recover.Checkpoint(str(setting.folder / name)),
    )
    state.sync()
    return state


def _commit_beside_a_write(state: recover.TorchState) -> None:
    state.batch += 1
    state.commit()
    state.batch += 1
    state.commit()
    state.flush()
