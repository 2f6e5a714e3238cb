"""``horovod.tensorflow.keras.callbacks`` for Keras 3: Horovod's classes, but for what Keras 3 lacks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.keras.callbacks as _hvd
import keras
import numpy as np
import tensorflow as tf
from keras.src.utils import io_utils

from hvdrecover.errors import ConfigError
from hvdrecover.stand_in import standing_in
from hvdrecover.tensorflow.variables import Variable, is_variable, raw

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]

__getattr__, __dir__ = standing_in(_hvd, globals())


class BroadcastGlobalVariablesCallback(_hvd.BroadcastGlobalVariablesCallback):  # type: ignore[misc]
    """Sends a model's weights and its optimizer's variables to all ranks after the first batch of a ``fit``.

    Args:
        root_rank: the rank that sends.
        device: the device for the collectives.
        local_variables: variables that each rank keeps for itself.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        given = [local_variables] if is_variable(local_variables) else local_variables or []
        super().__init__(root_rank, device, [raw(each) for each in given])

    def register_local_var(self, var: Variable) -> None:
        super().register_local_var(raw(var))

    def on_train_begin(self, logs: Any = None) -> None:
        self.broadcast_done = False  # survivors of a recovery broadcast again, with newcomers

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:  # not before the first batch: an optimizer may have no variables yet
            return
        variables = map(raw, (*self.model.weights, *self.model.optimizer.variables))
        sent = [each for each in variables if each.ref() not in self._local_vars]

        # `hvd.broadcast_variables` keeps its trace, with the names of the first variables of these shapes. A
        # process that was replaced in between has another trace, and all would wait for ever.
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def broadcast() -> None:
            for number, each in enumerate(sent):
                name = f"hvdrecover.broadcast.{number}"
                each.assign(hvd.broadcast(each, self.root_rank, name=name, ignore_name_scope=True))

        with tf.device(self.device):
            broadcast()
        self.broadcast_done = True


class MetricAverageCallback(_hvd.MetricAverageCallback):  # type: ignore[misc]
    """Averages the metrics of an epoch across the ranks, for the callbacks after it."""

    def _average_metrics_in_place(self, logs: dict[str, Any] | None) -> None:
        if not logs or hvd.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        mine = tf.constant([float(logs[name]) for name in names], tf.float64)
        averages = hvd.allreduce(mine, op=hvd.Average, name="hvdrecover_metrics", device_dense=self.device)
        logs.update(zip(names, averages.numpy().tolist(), strict=True))


class _Rates:
    """Sets learning rates as Keras 3 does, and follows a resumed epoch."""

    _done = 0.0

    def on_epoch_begin(self: Any, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)  # type: ignore[misc]
        self._done = (self.params or {}).get("done", 0)

    def on_batch_begin(self: Any, batch: int, logs: Any = None) -> None:
        # Keras counts the batches of a resumed epoch from 0.
        super().on_batch_begin(batch if self.staircase else self._done + batch, logs)  # type: ignore[misc]

    def _adjust_learning_rate(self: Any, epoch: float) -> None:
        optimizer = self.model.optimizer
        before, rate = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = rate
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and before and rate != before and getattr(inner, "momentum", None):
            for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", []):
                velocity.assign(velocity * (rate / before))

    def on_epoch_end(self: Any, epoch: int, logs: dict[str, Any] | None = None) -> None:
        rate = float(self.model.optimizer.learning_rate)
        if logs is not None:
            logs["lr"] = rate
        if getattr(self, "verbose", 0) and epoch == self.end_epoch - 1 and hvd.rank() == 0:
            io_utils.print_msg(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class LearningRateScheduleCallback(_Rates, _hvd.LearningRateScheduleCallback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``, from one epoch up to another.

    Horovod defines the arguments:

    - ``initial_lr``: the rate that is multiplied.
    - ``multiplier``: a function of the epoch, or the base of an exponential decay.
    - ``start_epoch``: the first epoch for which the rate is set.
    - ``end_epoch``: the first epoch for which it is no longer set; None for all epochs.
    - ``staircase``: set it once an epoch; else at each batch, for an epoch with a fraction.
    - ``momentum_correction``: scale the velocities of optimizers that have a ``momentum`` along with the
      rate, as of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 3. Horovod scales the momentum
      for one step, which has the same result; but Keras compiles the momentum into the step.
    - ``steps_per_epoch``: batches of an epoch; None asks Keras.
    """


class LearningRateWarmupCallback(_Rates, _hvd.LearningRateWarmupCallback):  # type: ignore[misc]
    """Raises the learning rate from a single rank's to ``initial_lr``, in a straight line.

    After Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.

    Horovod defines the arguments:

    - ``initial_lr``: the rate of all ranks together.
    - ``warmup_epochs``: how many epochs it takes.
    - ``momentum_correction``: see `LearningRateScheduleCallback`, as for ``steps_per_epoch``.
    - ``verbose``: 1 prints a line at the end.
    """


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ``keras.callbacks.ModelCheckpoint`` of the best model, whose ``filepath`` is set later."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        # In `horovod.keras`, `mode` comes third: by position, it would turn on saving weights only.
        if not isinstance(save_weights_only, bool):
            problem = f"must be True or False, got {save_weights_only!r}; pass mode by name"
            raise ConfigError("save_weights_only", problem)
        # Keras demands a name with a known suffix.
        unused = "unnamed.weights.h5" if save_weights_only else "unnamed.keras"
        super().__init__(unused, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = None
