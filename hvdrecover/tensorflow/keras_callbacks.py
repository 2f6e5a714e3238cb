"""Keras callbacks by which a state follows ``model.fit``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvdrecover import config
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.dataset import part_done
from hvdrecover.tensorflow.keras.callbacks import MetricAverageCallback
from hvdrecover.tensorflow.keras_progress import Commit, Progress, datasets
from hvdrecover.tensorflow.state import TensorFlowState
from hvdrecover.tensorflow.steps import Steps


def fit_callbacks(
    state: TensorFlowState,
    *,
    commit_every_batches: int | None = None,
    average_metrics: bool = True,
    warmup_epochs: float | None = None,
    tensorboard: str | None = None,
    keep: Sequence[keras.callbacks.Callback] = (),
) -> list[keras.callbacks.Callback]:
    """The callbacks of one call of ``model.fit``; they may stand anywhere among your own.

    Yours see averaged metrics, and a commit comes when they have done what they do at the end of a batch or
    an epoch. The state of Keras's own callbacks is part of each commit.

    Args:
        state: has the attributes ``epoch`` and ``batch``.
        commit_every_batches: commit after every so many batches; in any case at the end of each epoch.
        average_metrics: average each epoch's metrics across the ranks.
        warmup_epochs: scale the learning rate by the number of ranks, and let it rise to that over so many
            epochs; see `LearningRate`. None leaves it alone.
        tensorboard: folder for TensorBoard's logs, which only rank 0 writes.
        keep: callbacks of your own. Their attributes that a state could hold as plain objects, see
            `hvdrecover.checkpoint.values`, are part of each commit, too.

    Raises:
        ConfigError: the state lacks ``epoch`` or ``batch``, or has virtual ranks, a number makes no sense, or
            TensorBoard is not installed.

    Examples:
        >>> state = recover.TensorFlowState(epoch=0, batch=0)
        >>> callbacks = recover.fit_callbacks(state, commit_every_batches=10)
        >>> model.fit(dataset, epochs=10, callbacks=callbacks)  # doctest: +SKIP
    """
    if state._virtual_ranks is not None:
        raise ConfigError(
            "model.fit",
            "it does a step for each batch, and a step of virtual ranks has one for each of them; train by a "
            "loop over state.steps(dataset)",
        )
    if commit_every_batches is not None and commit_every_batches < 1:
        raise ConfigError("commit_every_batches", f"{commit_every_batches!r} is not a number from 1 on")
    found: list[keras.callbacks.Callback] = []
    if average_metrics:
        found.append(MetricAverageCallback())
    if warmup_epochs is not None:
        found.append(LearningRate(state, warmup_epochs))
    if tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard", "the package tensorboard, which writes its logs, is not installed")
    if tensorboard is not None and hvd.rank() == 0:
        found.append(keras.callbacks.TensorBoard(config.absolute(tensorboard)))
    progress = Progress(state, commit_every_batches)
    first = [*found, Observer(state), progress]
    return [*first, Commit(progress, first, keep)]


class Observer(keras.callbacks.Callback):  # type: ignore[misc]
    """Reports the loss to the state.

    Args:
        state: what to tell.
    """

    _hvdrecover_kept = ()

    def __init__(self, state: TensorFlowState) -> None:
        super().__init__()
        self._state = state
        self._steps: Steps | None = state._framework.steps
        self._spoilt = False

    def set_model(self, model: keras.Model) -> None:
        """Before ``fit`` makes its training function."""
        super().set_model(model)
        if self._steps is not None:
            self._steps.watch(model)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Keras begins its means anew."""
        self._spoilt = False

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Tell the loss: of this batch if it is known, else Keras's mean over the epoch so far.

        Once that mean is not finite, it stays so, and says nothing of the batches to come.
        """
        if self._steps is not None:
            TensorFlowState.log_metrics(self._state, loss=self._steps.loss())
        elif logs and "loss" in logs and not self._spoilt:
            TensorFlowState.log_metrics(self._state, loss=logs["loss"])
            self._spoilt = not math.isfinite(logs["loss"])


class LearningRate(keras.callbacks.Callback):  # type: ignore[misc]
    """Scales the learning rate with the number of ranks, at the start and when ranks come or go.

    See `scaled`; after Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.

    Args:
        state: has the learning rate of a single rank as ``state.learning_rate``; the optimizer's own is set
            anew at every batch.
        warmup_epochs: see `scaled`.

    Raises:
        ConfigError: the state lacks ``learning_rate``, or a negative number of epochs.
    """

    _hvdrecover_kept = ("_set",)  # else a recovery would undo what other callbacks have made of the rate

    def __init__(self, state: TensorFlowState, warmup_epochs: float) -> None:
        super().__init__()
        if warmup_epochs < 0:
            raise ConfigError("warmup_epochs", f"{warmup_epochs!r} is not a number of epochs from 0 on")
        if not isinstance(getattr(state, "learning_rate", None), float):
            raise ConfigError(
                "state.learning_rate",
                "make the state with learning_rate=, the rate of a single rank; what the optimizer has may "
                "have been scaled before",
            )
        self._state = state
        self._warmup = warmup_epochs
        self._set: float | None = None

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Set the rate for the batch, if it changes."""
        epochs = self._state.epoch + part_done(datasets(self._state))
        rate = scaled(self._state.learning_rate, hvd.size(), epochs, self._warmup)
        if rate != self._set:
            self.model.optimizer.learning_rate = rate
            self._set = rate


def scaled(rate: float, size: int, epochs: float, warmup_epochs: float) -> float:
    """The learning rate for ``size`` ranks after a number of epochs.

    It rises from the rate of a single rank to ``size`` times that, in a straight line.

    Args:
        rate: of a single rank.
        size: number of ranks.
        epochs: how many have been trained, with the part of the present one.
        warmup_epochs: how many it takes to rise.
    """
    progress = 1.0 if epochs >= warmup_epochs else epochs / warmup_epochs
    return rate * (1.0 + progress * (size - 1.0))
