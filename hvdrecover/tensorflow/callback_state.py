"""The state of Keras's ``fit`` in a commit: that of its callbacks, and the metrics of the present epoch.

1. A ``fit`` begins. `FitState.start` names each callback by its class, and by its number among those of the
   class.
2. Most callbacks start again in their ``on_train_begin``. After that, `FitState.begin` sets the attributes
   that they had in the commit.
3. Before each commit, the ranks `exchange` their metrics, and the state of callbacks that only some ranks
   have, such as a ``ModelCheckpoint`` on rank 0: any rank may be the source rank of a recovery.

A commit holds the attributes in `KEPT` of Keras's own callbacks, and the ``state_dict()`` of the user's.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import BackupAndRestore, Callback, CallbackList, CSVLogger

from hvdrecover.checkpoint import values
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import World, gather_json

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


class FitState:
    """The part of a commit that belongs to a ``fit``; see `hvdrecover.state.adapter.HiddenAttribute`.

    Attributes:
        resumed: the state from which the present ``fit`` resumes; None if it is a new one.
        stop: whether a callback has stopped the training.
    """

    def __init__(self, world: World) -> None:
        self.resumed: Record | None = None
        self.stop = False
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
            self._held = {
                "epochs": self._epochs,
                "stop": self.stop,
                "metrics": self._metrics,
                "callbacks": {key: entries[key] for key in sorted(entries) if entries[key]["state"]},
            }
        return self._held

    def load(self, tree: Record | None) -> None:
        """Take the state from a commit. The next ``fit`` resumes from it."""
        if tree is not None and (not isinstance(tree, dict) or not tree.keys() >= _PARTS):
            raise ValueError("the state of Keras's callbacks lacks some of its parts")
        self._held, self._is_followed = tree, self._is_followed and tree is not None
        if tree is not None and self._is_followed:
            self.take(tree)

    def start(
        self, callbacks: Sequence[Callback], epochs: int | None, epoch: int, *, is_per_rank: bool = False
    ) -> None:
        """Before callbacks begin a ``fit`` up to ``epochs``: find out whether it is resumed, at an epoch.

        With ``is_per_rank``, each rank gets its own history, and attributes of callbacks, back.
        """
        held = self._held
        # A training function may have two fits. The first may be called again though the second resumes.
        is_other = held is not None and epochs is not None and epoch >= epochs and held["epochs"] != epochs
        self._is_followed, self.resumed = False, None if is_other else held
        self.stop, self._epochs, self._metrics = False, epochs, None
        self._named = _named(callbacks, self._world.rank(), each_its_own=is_per_rank)
        self._partial, self._elsewhere, self._appends = set(), {}, []
        for key, callback in self._named.items():
            if isinstance(callback, CSVLogger):
                callback.append_header = True
                is_resumed = self.resumed is not None and key in self.resumed["callbacks"]
                if is_resumed and not callback.append:
                    callback.append = True  # to its file; it must not open a new one
                    self._appends.append(callback)

    def begin(self) -> None:
        """All callbacks have begun: set their attributes, and learn which callbacks the other ranks have."""
        for each in self._appends:  # the files are open
            each.append = False
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
        """Set the state from a commit."""
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


def metrics_of(model: keras.Model) -> bytes:
    return b"".join(each.numpy().tobytes() for each in model.metrics_variables)


def add_metrics(model: keras.Model, data: bytes) -> None:
    """Add the numbers that metrics had before Keras reset them, unless the model has other metrics."""
    arrays = [each.numpy() for each in model.metrics_variables]
    if len(data) != sum(each.nbytes for each in arrays):
        return
    for variable, like in zip(model.metrics_variables, arrays, strict=True):
        variable.assign_add(np.frombuffer(data, like.dtype, like.size).reshape(like.shape))
        data = data[like.nbytes :]


# -- which callbacks, and which of their attributes ----------------------------------------------------------


def _named(callbacks: Sequence[Callback], rank: int, *, each_its_own: bool) -> dict[str, Callback]:
    """Return callbacks by class and number; a ``CSVLogger`` also by rank, as each rank has its own file.

    With ``each_its_own``, so are all but those in `_COMMON`.
    """
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
    """Return the names of the classes of Keras's and ours that a callback's class derives from."""
    return {each.__name__ for each in type(callback).__mro__ if _is_known(each)}


def _kept(callback: Callback) -> set[str]:
    return {name for kind in _kinds(callback) for name in KEPT.get(kind, ())}


def _is_stateful(callback: Callback) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def forgetful(callbacks: Iterable[Callback]) -> list[str]:
    """Return the classes of the script's own callbacks with attributes that commits do not hold."""
    found = [each for each in callbacks if not _is_known(type(each)) and not _is_stateful(each)]
    return sorted({type(each).__name__ for each in found if vars(each).keys() - vars(Callback()).keys()})


def _copy(value: Any) -> Any:
    """Return a copy that shares only tensors, which never change."""
    is_tensors = isinstance(value, list) and all(map(tf.is_tensor, value))
    return list(value) if is_tensors else copy.deepcopy(value)


def _get(callback: Callback, name: str) -> Any:
    value = getattr(callback, name)
    if name == "best_weights" and value is not None and not all(map(tf.is_tensor, value)):
        with tf.device("CPU:0"):  # a commit holds tensors beside JSON; from now on, so does the callback
            callback.best_weights = value = list(map(tf.constant, value))
    if name == "csv_file":  # its length: each row is flushed
        path = Path(callback.filename)
        return path.stat().st_size if path.exists() else None
    return history_text(callback) if name == "history" else _copy(value)


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


# -- callbacks and the list in which Keras calls them --------------------------------------------------------


def arrange(
    callback: Callback, first: Sequence[Callback] = (), last: Sequence[Callback] = ()
) -> list[Callback]:
    """Move callbacks to the beginning and to the end of the list that is calling one; return the list.

    Keras hands a callback its model, but not its list. So the list is looked for among the callers.
    """
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


class ResumedEpoch(Callback):  # type: ignore[misc]
    """Ends a resumed epoch when its data end.

    Keras expects as many batches as in any epoch. One more batch would fail, but only after the parts of the
    training step that need no data, such as the optimizer's counter.
    """

    _has_ended = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._has_ended = False

    def end_epoch(self) -> None:
        if not self.model.stop_training:
            self.model.stop_training = self._has_ended = True

    def on_test_begin(self, logs: Any = None) -> None:
        """The batches of the epoch are done: a callback that stops the training from now on stops it."""
        self._allow_next_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._allow_next_epoch()

    def _allow_next_epoch(self) -> None:
        if self._has_ended:
            self.model.stop_training = self._has_ended = False
