"""``horovod.tensorflow.keras.callbacks`` for Keras 3, which has other optimizers and another backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
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


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sends a model's weights and its optimizer's variables to all ranks after the first batch of a ``fit``.

    Args:
        root_rank: the rank that sends.
        device: the device for the collectives.
        local_variables: variables that each rank keeps for itself.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Sequence[Variable] | Variable | None = None
    ) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local: dict[int, Variable] = {}
        for variable in [local_variables] if is_variable(local_variables) else local_variables or []:
            self.register_local_var(variable)

    def register_local_var(self, var: Variable) -> None:
        if not is_variable(var):
            raise ConfigError("local_variables", f"a {type(var).__name__} is not a variable")
        self._local[id(raw(var))] = var

    def on_train_begin(self, logs: Any = None) -> None:
        self.broadcast_done = (
            False  # survivors of a recovery broadcast again, with ranks that have just started
        )

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.broadcast_done:  # not before the first batch: an optimizer may have no variables yet
            return
        variables = map(raw, (*self.model.weights, *self.model.optimizer.variables))
        sent = [each for each in variables if id(each) not in self._local]

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


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the metrics of an epoch across the ranks, for the callbacks after it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if not logs or hvd.size() == 1:
            return
        names = sorted(name for name, value in logs.items() if np.ndim(value) == 0)
        mine = tf.constant([float(logs[name]) for name in names], tf.float64)
        averages = hvd.allreduce(mine, op=hvd.Average, name="hvdrecover_metrics", device_dense=self.device)
        logs.update(zip(names, averages.numpy().tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``, from one epoch up to another.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or the base of an exponential decay.
        start_epoch: the first epoch for which the rate is set.
        end_epoch: the first epoch for which it is no longer set; None for all epochs.
        staircase: set it once an epoch; else at each batch, for an epoch with a fraction.
        momentum_correction: scale the velocities of optimizers that have a ``momentum`` along with the rate,
            as of Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 3. Horovod scales the momentum
            for one step, which has the same result; but Keras compiles the momentum into the step.
        steps_per_epoch: batches of an epoch; None asks Keras.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ConfigError("initial_lr", "it is what is multiplied, and None is not a learning rate")
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch, self._done = 0, 0.0
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps_per_epoch = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and not self.steps_per_epoch:
            raise ConfigError("steps_per_epoch", f"Keras does not know it; pass it to {type(self).__name__}")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch
        self._done = (self.params or {}).get("done", 0)  # Keras counts batches of a resumed epoch from 0

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        end = math.inf if self.end_epoch is None else self.end_epoch
        if not self.start_epoch <= self.current_epoch < end or (self.staircase and batch):
            return
        part = 0 if self.staircase else (self._done + batch) / self.steps_per_epoch  # type: ignore[operator]
        rate = self.initial_lr * self.multiplier(self.current_epoch + part)
        optimizer = self.model.optimizer
        before = float(optimizer.learning_rate)
        optimizer.learning_rate = rate
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if self.momentum_correction and before and rate != before and getattr(inner, "momentum", None):
            for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", []):
                velocity.assign(velocity * (rate / before))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from a single rank's to ``initial_lr``, in a straight line.

    After Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.

    Args:
        initial_lr: the rate of all ranks together.
        warmup_epochs: how many epochs it takes.
        momentum_correction: see `LearningRateScheduleCallback`, as for ``steps_per_epoch``.
        verbose: 1 prints a line at the end.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            done = epoch + 1 / self.steps_per_epoch  # type: ignore[operator]  # round numbers at an epoch's end
            rate: float = (done * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()
            return rate

        super().__init__(
            initial_lr, multiplier, 0, warmup_epochs, False, momentum_correction, steps_per_epoch
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            io_utils.print_msg(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


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
        # Keras demands a name with a known suffix.
        unused = "unnamed.weights.h5" if save_weights_only else "unnamed.keras"
        super().__init__(unused, monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = None
