"""``model.fit`` in an elastic job: the callbacks by which a state follows it, and by which it resumes.

Keras calls `Progress` before the user's callbacks, and `Commit` after them:

1. ``fit`` begins. `Progress` asks the state which ``fit`` is resumed (`FitState.start`). All callbacks begin;
   most of them start again. Then `FitState.begin` sets the attributes that they had in the commit.
2. An epoch begins. If it is resumed, `Commit` takes back what callbacks did at its beginning, such as another
   change to the learning rate: it is in the commit already.
3. A batch ends. `Progress` counts it. The user's callbacks do what they do. `Commit` commits when it is time.
4. An epoch ends. `Progress` counts it, and `Commit` commits. If a callback of any rank has stopped the
   training, it stops on all ranks.

A commit holds the attributes in `KEPT` of Keras's own callbacks, and the ``state_dict()`` of the user's.
Before each commit, the ranks `FitState.exchange` their metrics, and the state of callbacks that only some
ranks have, such as a ``ModelCheckpoint`` on rank 0: any rank may be the source rank of a recovery.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import BackupAndRestore, Callback, CallbackList, CSVLogger

from hvdrecover import heartbeat
from hvdrecover.checkpoint import values
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.state.state import State
from hvdrecover.tensorflow.dataset import ElasticDataset

if TYPE_CHECKING:
    from hvdrecover.tensorflow.state import TensorFlowState

Logs = Mapping[str, Any] | None
Record = dict[str, Any]
NAME = "_callbacks"  # in a commit, beside the state's attributes
_STATE = "state_dict"  # beside the names of attributes
_PARTS = {"epochs", "stop", "metrics", "callbacks"}

KEPT: dict[str, tuple[str, ...]] = {
    "BroadcastGlobalVariablesCallback": ("broadcast_done",),  # a resumed fit has the weights already
    "CSVLogger": ("csv_file", "keys"),
    "EarlyStopping": ("best_epoch", "best_weights", "stopped_epoch", "wait"),
    "History": ("history",),
    "LearningRateScheduler": (),
    "ModelCheckpoint": ("_batches_seen_since_last_saving", "_last_batch_seen"),
    "MonitorCallback": ("best",),  # the base of all that compare a metric with the best one
    "OrbaxCheckpoint": ("_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"),
    "ReduceLROnPlateau": ("cooldown_counter", "wait"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
}
"""The attributes of callbacks that are part of a commit, by the name of the class or a base class."""

_CHANGES_TRAINING = {"EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau", "SwapEMAWeights"}

# All ranks take one rank's state of these, because all ranks must do the same here.
_COMMON = {*_CHANGES_TRAINING, "BroadcastGlobalVariablesCallback"}


def fit_callbacks(
    state: TensorFlowState,
    *,
    commit_every_batches: int | None = None,
    average_metrics: bool = True,
) -> list[Callback]:
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
    from hvdrecover.tensorflow.keras.callbacks import MetricAverageCallback  # whose package imports states

    progress = Progress(state, commit_every_batches)
    first = [MetricAverageCallback(), progress] if average_metrics else [progress]
    return [*first, Commit(progress, first)]


class ResumedEpoch(Callback):  # type: ignore[misc]
    """Ends a resumed epoch when its data end."""

    _has_ended = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._has_ended = False

    def end_epoch(self) -> None:
        # Keras expects as many batches as in any epoch. One more batch would fail, but only after the parts
        # of the training step that need no data, such as the optimizer's counter.
        if not self.model.stop_training:
            self.model.stop_training = self._has_ended = True

    def on_test_begin(self, logs: Any = None) -> None:
        self._allow_next_epoch()  # a callback that stops the training from now on stops it

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._allow_next_epoch()

    def _allow_next_epoch(self) -> None:
        if self._has_ended:
            self.model.stop_training = self._has_ended = False


class Progress(ResumedEpoch):
    is_per_rank = False

    def __init__(self, state: TensorFlowState, every: int | None) -> None:
        super().__init__()
        self.state = state
        self.callbacks: Sequence[Callback] = ()  # all of this fit, in Keras's order
        self.is_resumed = False  # whether the present epoch has begun before this fit
        self.is_due = False  # whether there is to be a commit after this batch
        self.metrics = b""  # bytes of the metrics that a resumed epoch had before
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
        mine, compiled, optimizer = state._framework.attributes, state._fit.compiled, self.model.optimizer
        if mine.get("optimizer") is optimizer:
            state._fit.compiled = optimizer
        elif compiled is not None and mine.get("optimizer") is compiled and mine.get("model") is self.model:
            raise ConfigError(
                "state.optimizer",
                "is not the model's: model.compile was given another optimizer after the state was made, and "
                "commits lack that one; pass it the state's, as model.compile(state.optimizer, loss)",
            )
        for data in state._datasets:
            data.order.batch_size = data.batch_size * int(getattr(self.model, "steps_per_execution", 1) or 1)
        self._is_first, self.metrics = True, b""
        state._fit.start(self.callbacks, params.get("epochs"), state.epoch, is_per_rank=self.is_per_rank)

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        state = self.state
        if self._is_first and epoch != state.epoch:
            raise ConfigError(
                "initial_epoch",
                f"fit begins with epoch {epoch}, and the state is at {state.epoch}; pass "
                "initial_epoch=state.epoch",
            )
        self.is_resumed, self._is_first = state.batch > 0, False
        optimizer = self.model.optimizer  # or several in one, a MultiOptimizer
        rates = [
            getattr(each, "learning_rate", None) for each in getattr(optimizer, "optimizers", [optimizer])
        ]
        self.learning_rates = [(rate, rate.numpy()) for rate in rates if isinstance(rate, keras.Variable)]
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
            State.log_metrics(self.state, loss=logs["loss"])
        if self.metrics:  # in a new process, whose first batch has made some of the metrics
            self.resume_metrics(add=True)
        heartbeat.stepped()
        count, before = batch - self._first_batch + 1, self.state.batch
        for data in self._trained_on():
            data.record_batch(count)
        self.state.batch = before + count
        self.is_due = self._every is not None and before // self._every < self.state.batch // self._every

    def resume_metrics(self, *, add: bool) -> None:
        """Give metrics the numbers that they had before Keras reset them, unless the model has others."""
        data, arrays = self.metrics, [each.numpy() for each in self.model.metrics_variables]
        if fits := len(data) == sum(each.nbytes for each in arrays):
            for variable, like in zip(self.model.metrics_variables, arrays, strict=True):
                value = np.frombuffer(data, like.dtype, like.size).reshape(like.shape)
                (variable.assign_add if add else variable.assign)(value)
                data = data[like.nbytes :]
        if fits or add:
            self.metrics = b""

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
        heartbeat.heartbeat()  # a validation may take longer than a hang

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.state.epoch, self.state.batch = epoch + 1, 0


class Commit(Callback):  # type: ignore[misc]
    """Commits after all other callbacks. Those in ``first`` are called before the user's."""

    def __init__(self, progress: Progress, first: Sequence[Callback]) -> None:
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
        progress, fit = self._progress, self._state._fit
        if not progress.is_resumed:
            return
        for rate, value in progress.learning_rates:
            rate.assign(value)
        if fit.resumed is not None:
            fit.take(fit.resumed)
            progress.metrics = fit.metrics([self._state.epoch, self._state.batch])
            progress.resume_metrics(add=False)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        progress, state, is_over = self._progress, self._state, self._progress.is_over()
        if progress.is_due and not is_over and not self.model.stop_training:
            mine = b"".join(each.numpy().tobytes() for each in self.model.metrics_variables)
            state._fit.exchange(mine, [state.epoch, state.batch])
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


def arrange(
    callback: Callback, first: Sequence[Callback] = (), last: Sequence[Callback] = ()
) -> list[Callback]:
    """Move callbacks to the beginning and to the end of the list that is calling one; return the list."""
    # Keras hands a callback its model, but not its list. So look for the list among the callers.
    frame = inspect.currentframe()
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, CallbackList) and any(each is callback for each in found.callbacks):
            break
        frame = frame.f_back
    else:
        return []
    if any(isinstance(each, BackupAndRestore) for each in found.callbacks):
        raise ConfigError(
            "callbacks",
            "BackupAndRestore would load its own backup over the state that was recovered. Leave it out: the "
            "state's commits replace it",
        )
    placed = {id(each) for each in (*first, *last)}
    others = [each for each in found.callbacks if id(each) not in placed]
    found.callbacks = [*first, *others, *last]  # a new list: Keras may be iterating over the old one
    return list(found.callbacks)


class FitState:
    """The part of a commit that belongs to a ``fit``; see `hvdrecover.state.adapter.HiddenAttribute`."""

    def __init__(self, world: World) -> None:
        self.resumed: Record | None = None  # the state from which the present fit resumes
        self.stop = False  # whether a callback has stopped the training
        self.compiled: Any = None  # the model's optimizer when the state was made, or in its last fit
        self._world = world
        self._held: Record | None = None  # None if no fit has begun, or the last one has ended normally
        self._is_followed = False  # whether the present callbacks have the state
        self._epochs: int | None = None
        self._metrics: Record | None = None
        self._named: dict[str, Callback] = {}
        self._partial: set[str] = set()  # this rank's callbacks that other ranks lack
        self._elsewhere: Record = {}  # the states of other ranks' callbacks
        self._appends: list[CSVLogger] = []  # those that append to their file in this fit only

    def tree(self) -> Record | None:
        """Return the state of the ``fit`` under way. If a fault has ended it, return its last state."""
        if self._is_followed:
            entries = {**self._elsewhere, **{key: self._entry(key) for key in self._named}}
            kept = {key: entries[key] for key in sorted(entries) if entries[key]["state"]}
            common = {"epochs": self._epochs, "stop": self.stop, "metrics": self._metrics}
            self._held = {**common, "callbacks": kept}
        return self._held

    def load(self, tree: Record | None) -> None:
        if tree is not None and (not isinstance(tree, dict) or not tree.keys() >= _PARTS):
            raise ValueError("the state of Keras's callbacks lacks some of its parts")
        self._held, self._is_followed = tree, self._is_followed and tree is not None
        if tree is not None and self._is_followed:
            self.take(tree)

    def start(
        self, callbacks: Sequence[Callback], epochs: int | None, epoch: int, *, is_per_rank: bool = False
    ) -> None:
        """Find out whether a ``fit`` that begins at ``epoch`` is resumed, before its callbacks begin."""
        held = self._held
        # A training function may have two fits. The first may be called again though the second resumes.
        is_other = held is not None and epochs is not None and epoch >= epochs and held["epochs"] != epochs
        self._is_followed, self.resumed = False, None if is_other else held
        self.stop, self._epochs, self._metrics = False, epochs, None
        # With `is_per_rank`, each rank gets back its own history and attributes of callbacks.
        self._named = _named(callbacks, self._world.rank(), each_its_own=is_per_rank)
        self._partial, self._elsewhere, self._appends = set(), {}, []
        for key, callback in self._named.items():
            if isinstance(callback, CSVLogger):
                callback.append_header = True
                if not callback.append and self.resumed is not None and key in self.resumed["callbacks"]:
                    callback.append = True  # to its file; it must not open a new one
                    self._appends.append(callback)

    def begin(self) -> None:
        """All callbacks have begun: set their attributes, and learn which callbacks the other ranks have."""
        for each in self._appends:
            each.append = False  # the files are open
        if self.resumed is not None:
            self.take(self.resumed)
        self._is_followed = self.resumed is not None or self._held is None
        mine = {key: bool(_kinds(each) & _CHANGES_TRAINING) for key, each in self._named.items()}
        rows = gather_json(self._world, mine, "hvdrecover.callbacks")
        for key in sorted(set().union(*rows)):
            lacking = [rank for rank, row in enumerate(rows) if key not in row]
            if lacking and any(row.get(key) for row in rows):
                raise ConfigError(
                    "callbacks",
                    f"rank {lacking[0]} has no {key}, and others have; as it changes what ranks must have in "
                    "common, pass it to fit on all of them",
                )
            if lacking and key in mine:
                self._partial.add(key)
        self.exchange()

    def exchange(self, metrics: bytes = b"", at: Sequence[int] = ()) -> None:
        """Exchange what ranks do not have in common; within an epoch, also its metrics at epoch and batch."""
        entries = {key: values.encode(self._entry(key), key) for key in sorted(self._partial)}
        mine = {"stop": self.stop, "metrics": metrics.hex(), "callbacks": entries}
        rows = gather_json(self._world, mine, "hvdrecover.fit")
        self.stop = any(row["stop"] for row in rows)
        self._metrics = {"at": list(at), "rows": [row["metrics"] for row in rows]} if metrics else None
        for row in rows:
            self._elsewhere |= {key: values.decode(entry) for key, entry in row["callbacks"].items()}

    def metrics(self, at: Sequence[int]) -> bytes:
        """Return this rank's metrics in the commit, if it is of this epoch and batch, and as many ranks."""
        found = self._metrics
        if found is None or found["at"] != list(at) or len(found["rows"]) != self._world.size():
            return b""
        row = found["rows"][self._world.rank()]
        return bytes.fromhex(row) if isinstance(row, str) else b""  # version 0.1.0 wrote arrays

    def take(self, record: Record) -> None:
        self.stop, self._metrics = record["stop"], record["metrics"]
        entries = record["callbacks"]
        self._elsewhere = {key: entry for key, entry in entries.items() if key not in self._named}
        for key, callback in self._named.items():
            state = entries.get(key, {}).get("state", {})
            # Anybody who can write to the root can choose the names in a commit: no others may be set.
            for name in _kept(callback) & state.keys():
                _set(callback, name, state[name])
            if _STATE in state and _is_stateful(callback):
                callback.load_state_dict(copy.deepcopy(state[_STATE]))

    def end(self) -> None:
        if self._is_followed:
            self._is_followed, self._held = False, None

    def _entry(self, key: str) -> Record:
        callback = self._named[key]
        state = {name: _get(callback, name) for name in sorted(_kept(callback) & vars(callback).keys())}
        if _is_stateful(callback):
            state[_STATE] = copy.deepcopy(callback.state_dict())
        return {"state": state}


def _named(callbacks: Sequence[Callback], rank: int, *, each_its_own: bool) -> dict[str, Callback]:
    """Return callbacks by class and number; some also by rank, such as a ``CSVLogger`` with its own file."""
    found: dict[str, Callback] = {}
    count: Counter[str] = Counter()
    for each in callbacks:
        if _is_known(type(each)) and not _kinds(each) & KEPT.keys():
            continue  # nothing of it has to be kept
        name = type(each).__name__
        count[name] += 1
        number = f"#{count[name]}" if count[name] > 1 else ""
        is_own = isinstance(each, CSVLogger) or (each_its_own and not _kinds(each) & _COMMON)
        found[f"{name}{number}@{rank}" if is_own else f"{name}{number}"] = each
    return found


def _is_known(kind: type) -> bool:
    return kind.__module__.startswith(("keras.", "hvdrecover."))


def _kinds(callback: Callback) -> set[str]:
    return {each.__name__ for each in type(callback).__mro__ if _is_known(each)}


def _kept(callback: Callback) -> set[str]:
    return {name for kind in _kinds(callback) for name in KEPT.get(kind, ())}


def _is_stateful(callback: Callback) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def forgetful(callbacks: Iterable[Callback]) -> list[str]:
    """Return the classes of the script's own callbacks with attributes that commits do not hold."""
    found = [each for each in callbacks if not _is_known(type(each)) and not _is_stateful(each)]
    return sorted({type(each).__name__ for each in found if vars(each).keys() - vars(Callback()).keys()})


def _get(callback: Callback, name: str) -> Any:
    value = getattr(callback, name)
    if name == "best_weights" and value is not None and not all(map(tf.is_tensor, value)):
        with tf.device("CPU:0"):  # a commit holds tensors beside JSON; from now on, so does the callback
            callback.best_weights = value = list(map(tf.constant, value))
    if name == "csv_file":  # its length: each row is flushed
        path = Path(callback.filename)
        return path.stat().st_size if path.exists() else None
    return history_text(callback) if name == "history" else _copy(value)


def _copy(value: Any) -> Any:
    is_tensors = isinstance(value, list) and all(map(tf.is_tensor, value))
    return list(value) if is_tensors else copy.deepcopy(value)  # tensors never change


def _set(callback: Callback, name: str, value: Any) -> None:
    if name == "history":
        set_history(callback, value)
    elif name != "csv_file":
        setattr(callback, name, _copy(value))
    elif value is not None and (path := Path(callback.filename)).exists():
        # Remove the rows that were written after the commit. The file is open for appending.
        os.truncate(path, min(value, path.stat().st_size))
        callback.append_header = path.stat().st_size == 0


def history_text(callback: keras.callbacks.History) -> str:
    """Return the epochs and metrics as one text, made once an epoch: a long history would slow commits."""
    epochs = getattr(callback, "epoch", [])
    length, text = getattr(callback, "_hvdrecover_text", (-1, ""))
    if length != len(epochs):
        text = json.dumps([epochs, callback.history], default=_numbers)
        callback._hvdrecover_text = (len(epochs), text)
    return text


def set_history(callback: keras.callbacks.History, text: str) -> None:
    callback.epoch, callback.history = json.loads(text)
    callback._hvdrecover_text = (-1, "")


def _numbers(value: Any) -> Any:
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biuf" else None
