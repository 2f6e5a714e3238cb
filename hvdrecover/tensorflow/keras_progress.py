"""The progress of ``model.fit``: counted before the user's callbacks are called, committed after them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow import callback_list, kept_metrics, xla
from hvdrecover.tensorflow.dataset import ElasticDataset
from hvdrecover.tensorflow.kept_callbacks import Fit, Record
from hvdrecover.tensorflow.state import TensorFlowState

logger = logging.getLogger(__name__)

_FORGOTTEN = (
    "attributes of callbacks are not in commits, and start with new values: %s. To keep plain attributes, "
    "name these callbacks in hvdrecover's fit_callbacks(state, keep=[...])"
)
_REFUSED = (
    "attributes of callbacks are not taken from the commit: %s. Each must exist before fit begins, with a "
    "value of the same type (or None), and a path must be in the same folder. Set them in the callback's "
    "__init__"
)


class Progress(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the state's counters and data cursors; called before the user's callbacks.

    Args:
        state: has the attributes ``epoch`` and ``batch``; batches count from the start of the epoch.
        every: commit after every so many batches; None only at the end of an epoch.

    Raises:
        ConfigError: the state lacks ``epoch`` or ``batch``.

    Attributes:
        callbacks: all of this ``fit``, in Keras's order.
        fit: their state.
        record: what this ``fit`` resumes from; None if it is a new one.
        within: whether it begins inside an epoch.
        is_due: whether there is to be a commit after this batch.
        is_over: whether no data of the epoch are left.
    """

    _hvdrecover_kept = ()

    def __init__(self, state: TensorFlowState, every: int | None) -> None:
        super().__init__()
        for name in ("epoch", "batch"):
            if not isinstance(getattr(state, name, None), int):
                raise ConfigError(
                    f"state.{name}", f"make the state with {name}=0; model.fit is resumed by it"
                )
        self.state = state
        self.callbacks: Sequence[keras.callbacks.Callback] = ()
        self.keep: Sequence[keras.callbacks.Callback] = ()
        self.fit = Fit((), (), None, 0)
        self.record: Record | None = None
        self.within = self.is_due = self.is_over = False
        self._every = every
        self._begun = 0
        self._begins = self._resumed = self._ended = False
        self._metrics: kept_metrics.Row | None = None
        self._before: dict[int, int] = {}
        self._trained: list[ElasticDataset] | None = None

    def set_model(self, model: keras.Model) -> None:
        """Before ``fit`` makes its training function: what can't be compiled must not be."""
        super().set_model(model)
        xla.switch_off(model)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """See what is resumed from."""
        _refuse(self.callbacks, self.keep, self.params or {}, self.state)
        for data in datasets(self.state):
            data.order.batch_size = data.batch_size * int(getattr(self.model, "steps_per_execution", 1) or 1)
        self.within, self._begins, self._ended = self.state.batch > 0, True, False
        self.is_due = self.is_over = False
        self._metrics = None
        epochs = (self.params or {}).get("epochs")
        self.record = self.state._callbacks.resumes(epochs, self.state.epoch)
        self.fit = Fit(self.callbacks, self.keep, epochs, self.state._world.rank())
        self.fit.reopen(self.record)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Go to the epoch, or on with it."""
        if self._begins and epoch != self.state.epoch:
            raise ConfigError(
                "initial_epoch",
                f"fit begins with epoch {epoch}, and the state is at {self.state.epoch}; pass "
                "initial_epoch=state.epoch",
            )
        self._begins, self._trained = False, None
        self._rates = [(each, each.numpy()) for each in _learning_rates(self.model.optimizer)]
        for data in datasets(self.state):
            data.set_epoch(epoch)
        self._resumed = any(data.order.done for data in datasets(self.state))
        self._before = {id(data): data.order.begun for data in datasets(self.state)}

    def resume_epoch(self) -> None:
        """Undo what other callbacks did at the beginning of an epoch that had begun before."""
        for rate, value in self._rates:
            rate.assign(value)
        if self.record is not None:
            self.fit.take(self.record)
            row = kept_metrics.of_rank(self.record["metrics"], self.state)
            self._metrics = row if row is None or not kept_metrics.assign(self.model, row) else None

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Remember where a run of batches begins; with ``steps_per_execution`` it has several."""
        self._begun = batch
        for each in self.state._framework.step_observers:
            each.step_begins()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count."""
        if self._metrics is not None:  # some are made by the first batch only
            kept_metrics.add(self.model, self._metrics)
            self._metrics = None
        before = self.state.batch
        count = batch - self._begun + 1
        heartbeat.stepped()
        for data in self.trained():
            data.record_batch(count)
        self.state.batch = before + count
        self.is_due = self._every is not None and before // self._every < self.state.batch // self._every
        self.is_over = bool(self.trained()) and all(data.is_done for data in self.trained())

    def trained(self) -> list[ElasticDataset]:
        """Return the data sets of this epoch's training; iterations to validate over others begin later."""
        if self._trained is None:
            found = datasets(self.state)
            begun = [data for data in found if data.order.begun != self._before.get(id(data))]
            self._trained = begun or found
        return self._trained

    def end_epoch(self) -> None:
        """End a resumed epoch of which nothing is left.

        Keras expects as many batches as in any epoch. One too many would fail, but not before parts of the
        training step that need no data have been done, such as counting it.
        """
        if self._resumed and self.is_over and not self.model.stop_training:
            self.model.stop_training = self._ended = True

    def on_test_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """The epoch's batches are done: whoever ends the training now, means it."""
        self._allow_next_epoch()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Count."""
        self._allow_next_epoch()
        self.state.epoch, self.state.batch = epoch + 1, 0

    def _allow_next_epoch(self) -> None:
        if self._ended:
            self.model.stop_training = self._ended = False  # the next epoch is to come


class Commit(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits; called after all other callbacks, so that what they have done is part of it.

    Args:
        progress: counts.
        first: what is to be called before the user's callbacks, wherever it stands.
        keep: the user's callbacks whose plain attributes are kept.
    """

    _hvdrecover_kept = ()

    def __init__(
        self,
        progress: Progress,
        first: Sequence[keras.callbacks.Callback],
        keep: Sequence[keras.callbacks.Callback],
    ) -> None:
        super().__init__()
        progress.keep = keep
        self._progress = progress
        self._first = first
        self._skips = False

    def set_model(self, model: keras.Model) -> None:
        """Take the last place in Keras's list."""
        super().set_model(model)
        if (found := callback_list.list_of(self)) is not None:
            callback_list.arrange(found, self._first, [self])
            self._progress.callbacks = found.callbacks

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """All callbacks have begun anew: give them the state that they had."""
        progress, state = self._progress, self._progress.state
        if progress.record is not None:
            progress.fit.take(progress.record)
            _warn(_FORGOTTEN, progress.fit.forgotten(progress.record), state)
            _warn(_REFUSED, progress.fit.refused, state)
            if progress.record["stop"] and not state.batch:
                self.model.stop_training = self._skips = True
                self.model._initial_epoch = sys.maxsize  # as Keras's BackupAndRestore does
        progress.fit.join(state._world)
        state._callbacks.begin(progress.fit, progress.record)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Callbacks have begun an epoch, perhaps for the second time."""
        if self._progress.within:
            self._progress.within = False
            self._progress.resume_epoch()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Commit when it is time; at the end of an epoch, that comes with `on_epoch_end`."""
        progress, state = self._progress, self._progress.state
        if progress.is_due and not progress.is_over and not self.model.stop_training:
            progress.fit.metrics = kept_metrics.of_all(self.model, state)
            progress.fit.exchange(state._world, within_epoch=True)
            state.commit()
        progress.end_epoch()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Commit the end of the epoch; if a callback of any rank has ended the training, it ends on all."""
        fit, state = self._progress.fit, self._progress.state
        fit.metrics = None
        fit.stop = bool(self.model.stop_training)
        if state._world.size() > 1:
            fit.stop = bool(state._world.allgather([fit.stop], "hvdrecover.stop").any())
            self.model.stop_training = fit.stop
        fit.exchange(state._world)
        state.commit()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """The next ``fit`` is another one."""
        if self._skips:
            self.model._initial_epoch, self._skips = None, False
        self._progress.state._callbacks.end()


def datasets(state: TensorFlowState) -> list[ElasticDataset]:
    """The elastic data sets that a state tracks."""
    return state._datasets


def _learning_rates(optimizer: Any) -> list[keras.Variable]:
    """Those of an optimizer, or of several in one, that callbacks can set."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rates = [getattr(each, "learning_rate", None) for each in getattr(inner, "optimizers", [inner])]
    return [rate for rate in rates if isinstance(rate, keras.Variable)]


def _refuse(
    callbacks: Sequence[keras.callbacks.Callback],
    keep: Sequence[keras.callbacks.Callback],
    params: Mapping[str, Any],
    state: TensorFlowState,
) -> None:
    """Refuse what would undo a recovery.

    Raises:
        ConfigError: a number of steps of the user's own, or a callback to keep that ``fit`` does not have.
    """
    for each in keep if callbacks else ():
        if not any(each is other for other in callbacks):
            raise ConfigError(
                "keep", f"fit was not given this {type(each).__name__}; pass it in callbacks=, too"
            )
    steps, lengths = params.get("steps"), {int(data.cardinality()) for data in datasets(state)}
    if steps is not None and lengths and steps not in lengths:
        raise ConfigError(
            "steps_per_epoch",
            f"an epoch of fit has {steps} batches, and one of elastic_dataset {min(lengths)}, by which it is "
            "resumed; leave steps_per_epoch out",
        )


def _warn(text: str, attributes: Mapping[str, Sequence[str]], state: TensorFlowState) -> None:
    found = "; ".join(f"{key} ({', '.join(names)})" for key, names in sorted(attributes.items()) if names)
    if found and state._world.rank() == 0:
        logger.warning(text, found)
