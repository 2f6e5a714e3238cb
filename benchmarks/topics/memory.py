"""How much host memory commits hold."""

from __future__ import annotations

import horovod.torch as hvd

import hvdrecover.torch as recover
from benchmarks.measure import PeakMemory, resident
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting, Training


def measure(setting: Setting) -> list[Row]:
    """Memory beyond that of the training itself, as multiples of the state."""
    hvd.init()
    training = Training(setting.shape, trained=True)
    for _ in range(3):
        training.step()  # its gradients come and go
    before, rounds = resident(), setting.rounds(3)
    state = recover.TorchState(
        model=training.model,
        optimizer=training.optimizer,
        checkpoint=recover.Checkpoint(str(setting.folder / "root")),
    )
    state.sync()
    once, in_flight, after = [], [], []
    for _ in range(rounds):
        training.step()
        state.commit()
        state.flush()
        once.append((resident() - before) / training.nbytes)
        # Without a step: the peak is to be that of commits, not of gradients.
        training.nudge()
        peak = PeakMemory()
        state.commit()
        training.nudge()
        state.commit()
        state.flush()
        in_flight.append((peak.nbytes() - before) / training.nbytes)
        after.append((resident() - before) / training.nbytes)
    large, title, unit = setting.state == "large", setting.shape.title, "states"
    return [
        Row("memory", "extra memory when idle", title, unit, after, goal=Goal(1.0, 1.0) if large else None),
        Row(
            "memory",
            "extra memory while a write is in flight, a commit beside it",
            title,
            unit,
            in_flight,
            goal=Goal(2.0, 2.0) if large else None,
        ),
    ]
