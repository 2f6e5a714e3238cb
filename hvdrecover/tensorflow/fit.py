"""``model.fit`` in an elastic job: the callbacks by which a state follows it, and by which it resumes.

Keras calls `Progress` before the user's callbacks, and `Commit` after them:

1. ``fit`` begins. `Progress` asks the state which ``fit`` is resumed. All callbacks begin. `Commit` gives
   them the state that they had in the commit.
2. An epoch begins. If it is resumed, `Commit` takes back what callbacks did at its beginning, such as another
   change to the learning rate: it is in the commit already.
3. A batch ends. `Progress` counts it. The user's callbacks do what they do. `Commit` commits when it is time.
4. An epoch ends. `Progress` counts it, and `Commit` commits. If a callback of any rank has stopped the
   training, it stops on all ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.callback_state import ResumedEpoch, add_metrics, arrange, metrics_of
from hvdrecover.tensorflow.dataset import ElasticDataset
from hvdrecover.tensorflow.keras.callbacks import MetricAverageCallback
from hvdrecover.tensorflow.state import TensorFlowState

Logs = Mapping[str, Any] | None


def fit_callbacks(
    state: TensorFlowState,
    *,
    commit_every_batches: int | None = None,
    average_metrics: bool = True,
) -> list[keras.callbacks.Callback]:
    """The callbacks of one call of ``model.fit``; they may stand anywhere among your own.

    Your callbacks see averaged metrics. A commit comes after all callbacks of a batch or an epoch have run.
    The state of Keras's own callbacks is part of each commit, and that of yours with ``state_dict()`` and
    ``load_state_dict()``: plain values, as a state could hold them.

    Args:
        state: has the attributes ``epoch`` and ``batch``.
        commit_every_batches: commit after every so many batches; in any case at the end of each epoch.
        average_metrics: average each epoch's metrics across the ranks.

    Examples:
        >>> state = recover.TensorFlowState(epoch=0, batch=0)
        >>> callbacks = recover.fit_callbacks(state, commit_every_batches=10)
        >>> model.fit(dataset, epochs=10, callbacks=callbacks)  # doctest: +SKIP
    """
    if state._session.context.ranks.virtual is not None:
        raise ConfigError(
            "model.fit",
            "it does a step for each batch, and a step of virtual ranks has one for each of them; train by a "
            "loop over state.steps(dataset)",
        )
    if commit_every_batches is not None and commit_every_batches < 1:
        raise ConfigError("commit_every_batches", f"must be an integer ≥ 1, got {commit_every_batches!r}")
    for name in ("epoch", "batch"):
        if not isinstance(getattr(state, name, None), int):
            raise ConfigError(f"state.{name}", f"make the state with {name}=0; model.fit is resumed by it")
    progress = Progress(state, commit_every_batches)
    first = [MetricAverageCallback(), progress] if average_metrics else [progress]
    return [*first, Commit(progress, first)]


class Progress(ResumedEpoch):
    """Keeps the state's counters and data cursors, and reports the loss.

    Attributes:
        callbacks: all callbacks of this ``fit``, in Keras's order.
        is_resumed: whether the present epoch has begun before this ``fit``.
        is_due: whether there is to be a commit after this batch.
        learning_rates: those at the beginning of the epoch.
        metrics: the bytes of the metrics that a resumed epoch had before.
    """

    is_per_rank = False

    def __init__(self, state: TensorFlowState, every: int | None) -> None:
        super().__init__()
        self.state = state
        self.callbacks: Sequence[keras.callbacks.Callback] = ()
        self.is_resumed = self.is_due = False
        self.metrics = b""
        self._every = every
        self._first_batch = 0  # of a run of batches; there are several with ``steps_per_execution``
        self._is_first = False
        self._begun: dict[int, int] = {}
        self._trained: list[ElasticDataset] | None = None

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        model.jit_compile = False  # XLA cannot compile Horovod's collectives

    def on_train_begin(self, logs: Logs = None) -> None:
        super().on_train_begin(logs)
        state, params = self.state, self.params or {}
        steps, lengths = params.get("steps"), {int(data.cardinality()) for data in state._datasets}
        if steps is not None and lengths and steps not in lengths:
            raise ConfigError(
                "steps_per_epoch",
                f"an epoch of fit has {steps} batches, and one of elastic_dataset {min(lengths)}, by which "
                "it is resumed; leave steps_per_epoch out",
            )
        for data in state._datasets:
            data.order.batch_size = data.batch_size * int(getattr(self.model, "steps_per_execution", 1) or 1)
        self._is_first, self.metrics = True, b""
        epochs = params.get("epochs")
        state._fit.start(self.callbacks, epochs, state.epoch, is_per_rank=self.is_per_rank)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        state = self.state
        if self._is_first and epoch != state.epoch:
            raise ConfigError(
                "initial_epoch",
                f"fit begins with epoch {epoch}, and the state is at {state.epoch}; pass "
                "initial_epoch=state.epoch",
            )
        self.is_resumed, self._is_first = state.batch > 0, False
        self.learning_rates = [(each, each.numpy()) for each in _learning_rates(self.model.optimizer)]
        for data in state._datasets:
            data.set_epoch(epoch)
        self._begun = {id(data): data.order.begun for data in state._datasets}
        self._trained = None
        if self.params:  # all callbacks have the same dict; LearningRateScheduleCallback reads this
            # Nothing is done of a data set for the validation; all others are at the same place.
            orders = [data.order for data in state._datasets if data.order.length]
            part = max((order.done / order.length for order in orders), default=0.0)
            steps = self.params.get("steps") or 0
            self.params["done"] = round(part * steps, 6) if state._datasets else state.batch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._first_batch = batch
        for each in self.state._framework.step_observers:
            each.step_begins()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if logs and "loss" in logs:  # Keras's mean over the epoch so far
            TensorFlowState.log_metrics(self.state, loss=logs["loss"])
        if self.metrics:  # not before: some metrics are made by the first batch
            add_metrics(self.model, self.metrics)
            self.metrics = b""
        heartbeat.stepped()
        count, before = batch - self._first_batch + 1, self.state.batch
        for data in self._trained_on():
            data.record_batch(count)
        self.state.batch = before + count
        self.is_due = self._every is not None and before // self._every < self.state.batch // self._every

    def _trained_on(self) -> list[ElasticDataset]:
        """Return the data sets that this epoch trains on. Iterations for a validation begin later."""
        if self._trained is None:
            found = self.state._datasets
            self._trained = [each for each in found if each.order.begun != self._begun.get(id(each))] or found
        return self._trained

    def is_over(self) -> bool:
        found = self._trained_on()
        return bool(found) and all(data.is_done for data in found)

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """A validation may take longer than a hang."""
        heartbeat.heartbeat()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.state.epoch, self.state.batch = epoch + 1, 0


class Commit(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits after all other callbacks. Those in ``first`` are called before the user's."""

    def __init__(self, progress: Progress, first: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._progress, self._state, self._first = progress, progress.state, first
        self._skips_all = False

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._progress.callbacks = arrange(self, self._first, [self])

    def on_train_begin(self, logs: Logs = None) -> None:
        fit = self._state._fit
        fit.begin()
        if fit.resumed is not None and fit.resumed["stop"] and not self._state.batch:
            self.model.stop_training = self._skips_all = True
            self.model._initial_epoch = sys.maxsize  # as Keras's BackupAndRestore does

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Take back what callbacks did at the beginning of an epoch that had begun before."""
        progress, fit = self._progress, self._state._fit
        if not progress.is_resumed:
            return
        for rate, value in progress.learning_rates:
            rate.assign(value)
        if fit.resumed is not None:
            fit.take(fit.resumed)
            progress.metrics = fit.metrics([self._state.epoch, self._state.batch])

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit if it is time. After the last batch of an epoch, `on_epoch_end` does."""
        progress, state, is_over = self._progress, self._state, self._progress.is_over()
        if progress.is_due and not is_over and not self.model.stop_training:
            state._fit.exchange(metrics_of(self.model), [state.epoch, state.batch])
            state.commit()
        if progress.is_resumed and is_over:
            progress.end_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        fit = self._state._fit
        fit.stop = bool(self.model.stop_training)
        fit.exchange()
        self.model.stop_training = fit.stop
        self._state.commit()

    def on_train_end(self, logs: Logs = None) -> None:
        if self._skips_all:
            self.model._initial_epoch, self._skips_all = None, False
        self._state._fit.end()


def _learning_rates(optimizer: Any) -> list[keras.Variable]:
    """Return the learning rates of an optimizer, or of several in one, that callbacks can set."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [getattr(each, "learning_rate", None) for each in getattr(inner, "optimizers", [inner])]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]
