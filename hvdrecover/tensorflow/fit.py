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

import math
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import horovod.tensorflow as hvd
import keras

from hvdrecover import config, heartbeat
from hvdrecover.clock import Clock
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.callback_state import Fit, add_metrics, arrange, metrics_of
from hvdrecover.tensorflow.collectives import switch_off_xla
from hvdrecover.tensorflow.dataset import ElasticDataset, part_done
from hvdrecover.tensorflow.keras.callbacks import MetricAverageCallback
from hvdrecover.tensorflow.state import TensorFlowState

Logs = Mapping[str, Any] | None


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

    Your callbacks see averaged metrics. A commit comes after all callbacks of a batch or an epoch have run.
    The state of Keras's own callbacks is part of each commit.

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
        raise ConfigError("commit_every_batches", f"must be an integer ≥ 1, got {commit_every_batches!r}")
    for name in ("epoch", "batch"):
        if not isinstance(getattr(state, name, None), int):
            raise ConfigError(f"state.{name}", f"make the state with {name}=0; model.fit is resumed by it")
    first: list[keras.callbacks.Callback] = []
    if average_metrics:
        first.append(MetricAverageCallback())
    if warmup_epochs is not None:
        first.append(LearningRate(state, warmup_epochs))
    if tensorboard is not None and find_spec("tensorboard") is None:
        raise ConfigError("tensorboard", "the package tensorboard, which writes its logs, is not installed")
    if tensorboard is not None and hvd.rank() == 0:
        first.append(keras.callbacks.TensorBoard(config.absolute(tensorboard)))
    progress = Progress(state, commit_every_batches, keep)
    first.append(progress)
    return [*first, Commit(progress, first)]


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the state's counters and data cursors, and reports the loss.

    Attributes:
        callbacks: all callbacks of this ``fit``, in Keras's order.
        fit: their state.
        is_within: whether this ``fit`` begins inside an epoch.
        is_due: whether there is to be a commit after this batch.
        is_over: whether no data of the epoch are left.
        is_resumed: whether the present epoch has begun before this ``fit``.
        metrics: the metrics that a resumed epoch had before; None without.
        pace: chooses how often commits are made; None if the user has.
        is_per_rank: whether each rank gets its own history, and attributes of callbacks, back.
    """

    is_per_rank = False

    def __init__(
        self,
        state: TensorFlowState,
        every: int | None,
        keep: Sequence[keras.callbacks.Callback],
        pace: Pace | None = None,
    ) -> None:
        super().__init__()
        self.state = state
        self.pace = pace
        self.callbacks: Sequence[keras.callbacks.Callback] = ()
        self.fit = Fit((), (), None, None, state._world)
        self.is_within = self.is_due = self.is_over = False
        self.metrics: bytes | None = None
        self._keep = keep
        self._every = every
        self._first_batch = 0  # of a run of batches; there are several with ``steps_per_execution``
        self._is_first = self.is_resumed = self._has_ended = self._is_spoilt = False
        self._begun: dict[int, int] = {}
        self._trained: list[ElasticDataset] | None = None

    def set_model(self, model: keras.Model) -> None:
        """Prepare the model before ``fit`` makes its training function."""
        super().set_model(model)
        switch_off_xla(model)

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find the state that this ``fit`` resumes from."""
        state, params = self.state, self.params or {}
        self._refuse_what_cannot_resume(params.get("steps"))
        for data in state._datasets:
            data.order.batch_size = data.batch_size * int(getattr(self.model, "steps_per_execution", 1) or 1)
        self.is_within, self._is_first, self._has_ended = state.batch > 0, True, False
        self.is_due = self.is_over = False
        self.metrics = None
        epochs = params.get("epochs")
        resumed = state._callbacks.resumed_by(epochs, state.epoch)
        own = self.is_per_rank
        self.fit = Fit(self.callbacks, self._keep, epochs, resumed, state._world, is_per_rank=own)

    def _refuse_what_cannot_resume(self, steps: int | None) -> None:
        for each in self._keep if self.callbacks else ():
            if not any(each is other for other in self.callbacks):
                raise ConfigError(
                    "keep", f"fit was not given this {type(each).__name__}; pass it in callbacks=, too"
                )
        lengths = {int(data.cardinality()) for data in self.state._datasets}
        if steps is not None and lengths and steps not in lengths:
            raise ConfigError(
                "steps_per_epoch",
                f"an epoch of fit has {steps} batches, and one of elastic_dataset {min(lengths)}, by which "
                "it is resumed; leave steps_per_epoch out",
            )

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Go to the epoch, or continue it."""
        state = self.state
        if self._is_first and epoch != state.epoch:
            raise ConfigError(
                "initial_epoch",
                f"fit begins with epoch {epoch}, and the state is at {state.epoch}; pass "
                "initial_epoch=state.epoch",
            )
        self._is_first, self._trained, self._is_spoilt = False, None, False
        self.learning_rates = [(each, each.numpy()) for each in _learning_rates(self.model.optimizer)]
        for data in state._datasets:
            data.set_epoch(epoch)
        self.is_resumed = any(data.order.done for data in state._datasets)
        self._begun = {id(data): data.order.begun for data in state._datasets}

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Remember where a run of batches begins."""
        self._first_batch = batch
        for each in self.state._framework.step_observers:
            each.step_begins()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Count the batches, and report the loss."""
        self._report_loss(logs or {})
        if self.metrics is not None:  # not before: some metrics are made by the first batch
            add_metrics(self.model, self.metrics)
            self.metrics = None
        count, before = batch - self._first_batch + 1, self.state.batch
        heartbeat.stepped()
        for data in self._trained_on():
            data.record_batch(count)
        self.state.batch = before + count
        every = self.pace.every if self.pace is not None else self._every
        self.is_due = every is not None and before // every < self.state.batch // every
        self.is_over = bool(self._trained_on()) and all(data.is_done for data in self._trained_on())

    def _report_loss(self, logs: Mapping[str, Any]) -> None:
        """Report Keras's mean of the loss over the epoch so far."""
        if "loss" in logs and not self._is_spoilt:
            TensorFlowState.log_metrics(self.state, loss=logs["loss"])
            # A mean that is not finite stays so until the epoch ends: it tells nothing of later batches.
            self._is_spoilt = not math.isfinite(logs["loss"])

    def _trained_on(self) -> list[ElasticDataset]:
        """Return the data sets that this epoch trains on. Iterators for the validation begin later."""
        if self._trained is None:
            found = self.state._datasets
            self._trained = [each for each in found if each.order.begun != self._begun.get(id(each))] or found
        return self._trained

    def end_epoch(self) -> None:
        """End a resumed epoch when its data end.

        Keras expects as many batches as in any epoch. One more batch would fail, but only after the parts of
        the training step that need no data, such as the optimizer's counter.
        """
        if self.is_resumed and self.is_over and not self.model.stop_training:
            self.model.stop_training = self._has_ended = True

    def on_test_begin(self, logs: Logs = None) -> None:
        """The batches of the epoch are done."""
        self._allow_next_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Count the epoch."""
        self._allow_next_epoch()
        self.state.epoch, self.state.batch = epoch + 1, 0

    def _allow_next_epoch(self) -> None:
        """Undo `end_epoch`. A callback that stops the training from now on stops it finally."""
        if self._has_ended:
            self.model.stop_training = self._has_ended = False


class Commit(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits after all other callbacks. Those in ``first`` are called before the user's."""

    def __init__(self, progress: Progress, first: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._progress = progress
        self._state = progress.state
        self._first = first
        self._skips_all = False

    def set_model(self, model: keras.Model) -> None:
        """Take the last place in Keras's list."""
        super().set_model(model)
        self._progress.callbacks = arrange(self, self._first, [self])

    def on_train_begin(self, logs: Logs = None) -> None:
        """All callbacks have begun: give them the state that they had."""
        fit, state = self._progress.fit, self._state
        fit.begin()
        if fit.resumed is not None and fit.resumed["stop"] and not state.batch:
            self.model.stop_training = self._skips_all = True
            self.model._initial_epoch = sys.maxsize  # as Keras's BackupAndRestore does
        state._callbacks.begin(fit)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Take back what callbacks did at the beginning of an epoch that had begun before."""
        progress = self._progress
        if not progress.is_within:
            return
        progress.is_within = False
        for rate, value in progress.learning_rates:
            rate.assign(value)
        if progress.fit.resumed is not None:
            progress.fit.take(progress.fit.resumed)
            progress.metrics = progress.fit.metrics([self._state.epoch, self._state.batch])

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Commit if it is time. After the last batch of an epoch, `on_epoch_end` does."""
        progress, state = self._progress, self._state
        if progress.is_due and not progress.is_over and not self.model.stop_training:
            pace = progress.pace
            proposal = 0 if pace is None else pace.proposal(state.batch)
            progress.fit.exchange(metrics_of(self.model), [state.epoch, state.batch], proposal)
            if pace is None:
                state.commit()
            else:
                pace.commit(state, progress.fit.every)
        progress.end_epoch()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Commit the end of the epoch."""
        fit = self._progress.fit
        fit.stop = bool(self.model.stop_training)
        fit.exchange()
        self.model.stop_training = fit.stop
        self._state.commit()

    def on_train_end(self, logs: Logs = None) -> None:
        """The next ``fit`` is another one."""
        if self._skips_all:
            self.model._initial_epoch, self._skips_all = None, False
        self._state._callbacks.end()


class Pace:
    """Chooses how often commits are made in an epoch: they may take two percent of the time.

    Attributes:
        every: after how many batches the next commit is made; the same on all ranks.
    """

    _SHARE = 0.02

    def __init__(self, clock: Clock) -> None:
        self.every = 1
        self._clock = clock
        self._cost = 0.0  # seconds of the last commit
        self._last: tuple[int, float] | None = None  # the batch of the last commit, and its time

    def proposal(self, batch: int) -> int:
        """Return after how many batches this rank would make the next commit."""
        if self._last is None or batch <= self._last[0]:
            return self.every
        per_batch = (self._clock.monotonic() - self._last[1]) / (batch - self._last[0])
        return max(1, math.ceil(self._cost / (self._SHARE * max(per_batch, 1e-6))))

    def commit(self, state: TensorFlowState, every: int) -> None:
        """Make a commit. The next one comes after so many batches, as the ranks have agreed."""
        began = self._clock.monotonic()
        state.commit()
        ended = self._clock.monotonic()
        self.every, self._cost, self._last = every, ended - began, (state.batch, ended)


def _learning_rates(optimizer: Any) -> list[keras.Variable]:
    """Return the learning rates of an optimizer, or of several in one, that callbacks can set."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [getattr(each, "learning_rate", None) for each in getattr(inner, "optimizers", [inner])]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


class LearningRate(keras.callbacks.Callback):  # type: ignore[misc]
    """Scales the learning rate with the number of ranks, at the start and when ranks come or go.

    See `scaled`; after Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.

    Args:
        state: has the learning rate of a single rank as ``state.learning_rate``; the optimizer's own is set
            whenever the result changes.
        warmup_epochs: see `scaled`.

    Raises:
        ConfigError: the state lacks ``learning_rate``, or a negative number of epochs.
    """

    def __init__(self, state: TensorFlowState, warmup_epochs: float) -> None:
        super().__init__()
        if warmup_epochs < 0:
            raise ConfigError("warmup_epochs", f"must be a number of epochs ≥ 0, got {warmup_epochs!r}")
        if not isinstance(getattr(state, "learning_rate", None), float):
            raise ConfigError(
                "state.learning_rate",
                "make the state with learning_rate=, the rate of a single rank; what the optimizer has may "
                "have been scaled before",
            )
        self._state = state
        self._warmup = warmup_epochs
        self._set: float | None = None  # part of commits

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Set the rate for the batch, if it changes."""
        epochs = self._state.epoch + part_done(self._state._datasets)
        rate = scaled(self._state.learning_rate, hvd.size(), epochs, self._warmup)
        if rate != self._set:
            self.model.optimizer.learning_rate = rate
            self._set = rate


def scaled(rate: float, size: int, epochs: float, warmup_epochs: float) -> float:
    """Return the learning rate after a number of epochs.

    It rises from the rate of a single rank to ``size`` times that, in a straight line.
    """
    progress = 1.0 if epochs >= warmup_epochs else epochs / warmup_epochs
    return rate * (1.0 + progress * (size - 1.0))
