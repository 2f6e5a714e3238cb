"""A replacement for ``horovod.tensorflow.keras.elastic``, with our state, training loop and callbacks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras.elastic as _hvd
import keras

from hvdrecover import heartbeat
from hvdrecover.stand_in import standing_in
from hvdrecover.state.run import run
from hvdrecover.tensorflow.elastic import TensorFlowKerasState
from hvdrecover.tensorflow.fit import ResumedEpoch, arrange

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

__getattr__, __dir__ = standing_in(_hvd, globals())


class KerasState(TensorFlowKerasState):
    """See `hvdrecover.tensorflow.elastic.TensorFlowKerasState`."""


class CommitStateCallback(_hvd.CommitStateCallback):  # type: ignore[misc]
    """Horovod's callback, after all other callbacks: it commits after batches and at the end of each epoch.

    There are ``batches_per_commit`` batches between commits. After the last batch of an epoch, the commit
    waits for the epoch's end, when the counters already point to the next epoch.
    """

    batches_per_commit: int
    batches_remaining: int

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        model.jit_compile = False  # XLA cannot compile Horovod's collectives
        arrange(self, last=[self])

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        heartbeat.stepped()
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self.batches_remaining = self.batches_per_commit
            steps = (self.params or {}).get("steps")
            if steps is None or batch + 1 < steps:
                self.commit()


class UpdateBatchStateCallback(ResumedEpoch):
    """Keeps in ``state.batch`` how many batches of the epoch are done.

    If the number of steps in an epoch is known, a resumed epoch has only its remaining steps.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None
        self._done = 0

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        arrange(self, first=[self])  # if a later callback stops the training, it stays stopped

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._done = self.state.batch
        if steps := (self.params or {}).get("steps"):
            self.steps_per_epoch = self.steps_per_epoch or steps
            # The other callbacks see how many steps are done, and how many are left.
            self.params |= {"done": self._done, "steps": self.steps_per_epoch - self._done}

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self._done + batch + 1
        if self._done and self.steps_per_epoch and self.state.batch >= self.steps_per_epoch:
            self.end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps in ``state.epoch`` how many epochs are done, by all calls of ``fit`` together."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch += 1
