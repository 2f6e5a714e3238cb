"""The state of Keras's ``fit`` in a commit: that of its callbacks, and the metrics of the present epoch.

1. A ``fit`` begins. `Fit` names each callback by its class, and by its number among those of the class.
2. Before each commit, the ranks `exchange` their metrics, and the state of callbacks that only some ranks
   have, such as a ``ModelCheckpoint`` on rank 0: any rank may be the source rank of a recovery.
3. The commit stores what `KeptCallbacks.tree` returns.
4. After a fault, `KeptCallbacks.load` holds the state from the commit until the training function calls
   ``fit`` again. Most callbacks start again in their ``on_train_begin``. After that, `Fit.take` sets their
   attributes.

Of Keras's own callbacks, a commit holds the attributes in `KEPT`. Of the user's callbacks that are passed as
``keep=``, it holds all attributes that are plain values. Of other callbacks it only holds marks of the
attributes that have changed, so that a resumed ``fit`` can warn which of them have lost their values.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import BackupAndRestore, Callback, CallbackList, CSVLogger

from hvdrecover.checkpoint import values
from hvdrecover.errors import ConfigError, UnsupportedValueError
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.tensorflow.dataset import part_done

logger = logging.getLogger(__name__)

Record = dict[str, Any]
NAME = "_callbacks"  # in a commit, beside the state's attributes
_PARTS = {"epochs", "stop", "metrics", "callbacks"}
_SCALARS = (type(None), bool, int, float, str)
_NUMBERS = bool | int | float | np.number
_MOST_NUMBERS = 1000  # maximum length of one metric's history, which is part of each commit

KEPT: dict[str, tuple[str, ...]] = {
    "BroadcastGlobalVariablesCallback": ("broadcast_done",),  # a resumed fit has the weights already
    "CSVLogger": ("csv_file", "keys"),
    "EarlyStopping": ("best_epoch", "best_weights", "stopped_epoch", "wait"),
    "History": ("history",),
    "LearningRate": ("_set",),  # ours: it must not undo the changes of other callbacks to the learning rate
    "LearningRateScheduler": (),
    "ModelCheckpoint": ("_batches_seen_since_last_saving", "_last_batch_seen"),
    "MonitorCallback": ("best", "monitor_op"),  # the base of all that compare a metric with the best one
    "OrbaxCheckpoint": ("_batches_seen_since_last_saving", "_last_batch_seen", "_total_batches_seen"),
    "ReduceLROnPlateau": ("cooldown_counter", "wait"),
    "SwapEMAWeights": ("_ema_weights_in_model",),
    "TensorBoard": ("_global_test_batch", "_global_train_batch"),
}
"""The attributes of callbacks that are part of a commit, by the name of the class or a base class."""

_CHANGES_TRAINING = {"EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau", "SwapEMAWeights"}

# All ranks take one rank's state of these, because all ranks must do the same here.
_COMMON = {*_CHANGES_TRAINING, "BroadcastGlobalVariablesCallback"}

_FORGOTTEN = (
    "attributes of callbacks are not in commits, and start with new values: %s. To keep plain attributes, "
    "name these callbacks in hvdrecover's fit_callbacks(state, keep=[...])"
)
_REFUSED = (
    "attributes of callbacks are not taken from the commit: %s. Each must exist before fit begins, with a "
    "value of the same type (or None), and a path must be in the same folder. Set them in the callback's "
    "__init__"
)


class KeptCallbacks:
    """The part of a commit that belongs to a ``fit``; see `hvdrecover.state.adapter.HiddenAttribute`."""

    def __init__(self) -> None:
        self._held: Record | None = None  # None if no fit has begun, or the last one has ended normally
        self._fit: Fit | None = None

    def tree(self) -> Record | None:
        """Return the state of the ``fit`` under way. If a fault has ended it, return its last state."""
        if self._fit is not None:
            self._held = _copy(self._fit.record())
        return self._held

    def load(self, tree: Record | None) -> None:
        """Take the state from a commit. The next ``fit`` resumes from it.

        Raises:
            ValueError: it is not what `tree` returns.
        """
        if tree is not None and (not isinstance(tree, dict) or not tree.keys() >= _PARTS):
            raise ValueError("the state of Keras's callbacks lacks some of its parts")
        self._held = None if tree is None else _copy(tree)
        if self._held is None:
            self._fit = None
        elif self._fit is not None:
            self._fit.take(self._held)

    def resumed_by(self, epochs: int | None, epoch: int) -> Record | None:
        """Return the state that a ``fit`` of so many epochs resumes from; None if it is a new one."""
        held = self._held
        over = epochs is not None and epoch >= epochs
        # A training function may have two fits. The first may be called again though the second resumes.
        return None if held is not None and over and held["epochs"] != epochs else held

    def begin(self, fit: Fit) -> None:
        """A ``fit`` has begun."""
        self._fit = fit if fit.resumed is not None or self._held is None else None

    def end(self) -> None:
        """A ``fit`` has ended normally."""
        if self._fit is not None:
            self._fit = self._held = None


class Fit:
    """The callbacks of one call of ``fit``.

    Attributes:
        resumed: the state that it resumes from; None for a new one.
        stop: whether a callback has stopped the training.
        every: after how many batches the next commit is made, as the ranks have agreed in `exchange`; 0 if
            they have not.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback],
        keep: Sequence[Callback],
        epochs: int | None,
        resumed: Record | None,
        world: World,
        *,
        is_per_rank: bool = False,
    ) -> None:
        self.resumed = resumed
        self.stop = False
        self.every = 0
        self._world = world
        self._epochs = epochs
        self._metrics: Record | None = None
        self._named = _named(callbacks, world.rank(), each_its_own=is_per_rank)
        self._keep = {key for key, each in self._named.items() if any(each is other for other in keep)}
        self._partial: set[str] = set()  # this rank's callbacks that other ranks lack
        self._elsewhere: Record = {}  # the states of other ranks' callbacks
        self._appends: list[tuple[CSVLogger, bool]] = []
        self._began: dict[str, Record] = {}  # marks of all attributes, when the fit began
        for key, callback in self._named.items():
            if isinstance(callback, CSVLogger):  # must append to its file, not open a new one
                callback.append_header = True
                if resumed is not None and key in resumed["callbacks"]:
                    self._appends.append((callback, callback.append))
                    callback.append = True

    def begin(self) -> None:
        """All callbacks have begun: set their attributes, and learn which callbacks the other ranks have.

        Raises:
            ConfigError: some ranks lack a callback that changes weights or learning rates.
        """
        if self.resumed is not None:
            refused = self.take(self.resumed)
            entries = self.resumed["callbacks"]
            lost = {
                key: [
                    name
                    for name, mark in entries.get(key, {}).get("marks", {}).items()
                    if _marks(callback).get(name) != mark
                ]
                for key, callback in self._named.items()
                if key not in self._keep
            }
            for text, attributes in ((_FORGOTTEN, lost), (_REFUSED, refused)):
                found = [f"{key} ({', '.join(names)})" for key, names in sorted(attributes.items()) if names]
                if found and self._world.rank() == 0:
                    logger.warning(text, "; ".join(found))
        for callback, append in self._appends:
            callback.append = append
        self._began = {key: _marks(callback) for key, callback in self._named.items()}
        mine = {key: bool(_kinds(each) & _CHANGES_TRAINING) for key, each in self._named.items()}
        rows = gather_json(self._world, mine, "hvdrecover.callbacks") if self._world.size() > 1 else [mine]
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

    def exchange(self, metrics: bytes = b"", at: Sequence[int] = (), every: int = 0) -> None:
        """Exchange what ranks do not have in common; all ranks call this before each commit.

        Within an epoch, that includes its `metrics_of`, at an epoch and a batch, and this rank's proposal
        for ``every``; the highest counts.
        """
        rows: list[Record] = [{"stop": self.stop, "metrics": metrics.hex(), "every": every, "callbacks": {}}]
        if self._world.size() > 1:
            entries = {key: values.encode(self._entry(key), key) for key in sorted(self._partial)}
            rows = gather_json(self._world, {**rows[0], "callbacks": entries}, "hvdrecover.fit")
        self.stop = any(row["stop"] for row in rows)
        self.every = max(row["every"] for row in rows)
        found = [np.frombuffer(bytes.fromhex(row["metrics"]), np.int64) for row in rows]
        self._metrics = {"at": list(at), "rows": np.stack(found)} if metrics else None
        for row in rows:
            self._elsewhere |= {key: values.decode(entry) for key, entry in row["callbacks"].items()}

    def metrics(self, at: Sequence[int]) -> bytes | None:
        """Return this rank's metrics in the commit, if it is of this epoch and batch, and as many ranks."""
        found = self._metrics
        if found is None or found["at"] != list(at) or len(found["rows"]) != self._world.size():
            return None
        return bytes(np.asarray(found["rows"][self._world.rank()]).tobytes())

    def record(self) -> Record:
        """Return the state that a commit stores."""
        entries = {**self._elsewhere, **{key: self._entry(key) for key in self._named}}
        return {
            "epochs": self._epochs,
            "stop": self.stop,
            "metrics": self._metrics,
            "callbacks": {key: entries[key] for key in sorted(entries) if any(entries[key].values())},
        }

    def take(self, record: Record) -> dict[str, list[str]]:
        """Set the state from a commit; return the names of the attributes that were refused, by callback.

        Anybody who can write to the checkpoint root can choose the values in a commit. So they must not
        replace methods, or choose where callbacks write.
        """
        self.stop, self._metrics = record["stop"], record["metrics"]
        entries = _copy(record["callbacks"])
        refused: dict[str, list[str]] = {}
        self._elsewhere = {key: entry for key, entry in entries.items() if key not in self._named}
        for key, callback in self._named.items():
            state = entries.get(key, {}).get("state", {})
            kept = _kept(callback)
            for name in kept & state.keys():
                _SET.get(name, _set)(callback, state[name], name)
            if key in self._keep:
                mine = _plain(callback)
                refused[key] = []
                for name in sorted(state.keys() - kept):
                    if name in mine and _may_replace(mine[name], state[name]):
                        setattr(callback, name, state[name])
                    else:
                        refused[key].append(name)
        return refused

    def _entry(self, key: str) -> Record:
        callback = self._named[key]
        state = {name: getattr(callback, name) for name in sorted(_kept(callback)) if name in vars(callback)}
        state = {name: _GET[name](callback, each) if name in _GET else each for name, each in state.items()}
        if key in self._keep:
            return {"state": {**_plain(callback), **state}, "marks": {}}
        began = self._began.get(key, {})
        marks = {name: mark for name, mark in _marks(callback).items() if mark != began.get(name)}
        return {"state": state, "marks": marks}


def metrics_of(model: keras.Model) -> bytes:
    """Return the bytes of a model's metrics in whole words, in Keras's order."""
    data = b"".join(each.numpy().tobytes() for each in model.metrics_variables)
    return data.ljust(-(-len(data) // 8) * 8, b"\0")


def add_metrics(model: keras.Model, data: bytes) -> None:
    """Add the numbers that metrics had before Keras reset them, unless the model has other metrics."""
    variables = model.metrics_variables
    arrays = [each.numpy() for each in variables]
    if not 0 <= len(data) - sum(each.nbytes for each in arrays) < 8:
        return
    for variable, like in zip(variables, arrays, strict=True):
        variable.assign_add(np.frombuffer(data, like.dtype, like.size).reshape(like.shape))
        data = data[like.nbytes :]


# -- which callbacks, and which of their attributes ----------------------------------------------------------


def _named(callbacks: Sequence[Callback], rank: int, *, each_its_own: bool) -> dict[str, Callback]:
    """Return callbacks by class and number; a ``CSVLogger`` also by rank, as each rank has its own file.

    With ``each_its_own``, so are all but those in `_COMMON`: each rank gets its own attributes back, such as
    its history.
    """
    found: dict[str, Callback] = {}
    count: Counter[str] = Counter()
    for each in callbacks:
        if is_known(type(each)) and not _kinds(each) & KEPT.keys():
            continue  # nothing of it has to be kept
        name = type(each).__name__
        count[name] += 1
        number = f"#{count[name]}" if count[name] > 1 else ""
        is_own = isinstance(each, CSVLogger) or (each_its_own and not _kinds(each) & _COMMON)
        found[f"{name}{number}@{rank}" if is_own else f"{name}{number}"] = each
    return found


def is_known(kind: type) -> bool:
    """Return whether a class of callbacks is Keras's or ours."""
    return kind.__module__.startswith(("keras.", "hvdrecover."))


def _kinds(callback: Callback) -> set[str]:
    """Return the names of the classes of Keras's and ours that a callback's class derives from."""
    return {each.__name__ for each in type(callback).__mro__ if is_known(each)}


def _kept(callback: Callback) -> set[str]:
    return {name for kind in _kinds(callback) for name in KEPT.get(kind, ())}


def _users(callback: Callback) -> list[str]:
    """Return the names of the attributes of a user's callback that none of Keras's own methods uses."""
    if is_known(type(callback)):
        return []
    methods = [
        method
        for kind in type(callback).__mro__
        if is_known(kind)
        for method in vars(kind).values()
        if inspect.isfunction(method)
    ]
    used = {"_model", *(name for method in methods for name in method.__code__.co_names)}
    return [name for name in vars(callback) if name not in used]


def _plain(callback: Callback) -> Record:
    """Return the user's attributes that a commit can hold as plain objects."""
    found = {}
    for name in _users(callback):
        try:
            values.encode(value := getattr(callback, name), name)
        except UnsupportedValueError:
            continue
        found[name] = value
    return found


def _marks(callback: Callback) -> Record:
    """Return marks of the user's plain attributes: of containers just the size, as they may be large."""
    found: Record = {}
    for name in _users(callback):
        value = getattr(callback, name)
        if type(value) in _SCALARS:
            found[name] = repr(value)
        elif isinstance(value, list | dict | set | tuple):
            found[name] = len(value)
    return found


def _may_replace(mine: Any, stored: Any) -> bool:
    """Return whether both are of one kind; paths must be in the same folder."""
    if mine is None or stored is None:
        return True
    if isinstance(mine, _NUMBERS):
        return isinstance(stored, _NUMBERS)
    same = type(mine) is type(stored)
    return same and (not isinstance(mine, str | PurePath) or PurePath(mine).parent == PurePath(stored).parent)


def _copy(tree: Any) -> Any:
    """Return a copy. Tensors, which never change, are shared; views of a commit's buffer become tensors."""
    if type(tree) is dict:
        return {key: _copy(item) for key, item in tree.items()}
    if type(tree) is list:
        return [item if type(item) in _SCALARS else _copy(item) for item in tree]
    if isinstance(tree, tf.Tensor):
        return tree
    if isinstance(tree, np.ndarray) and type(tree) is not np.ndarray:
        with tf.device("CPU:0"):
            return tf.constant(np.array(tree, copy=True, subok=False))
    return copy.deepcopy(tree)


# -- attributes that a commit holds in another form ----------------------------------------------------------


def _set(callback: Callback, value: Any, name: str) -> None:
    setattr(callback, name, value)


def _get_weights(callback: Callback, value: Any) -> Any:
    """Return tensors, which a commit stores as such; the callback has them from now on, as they are large."""
    if value is not None and not all(map(tf.is_tensor, value)):
        with tf.device("CPU:0"):
            callback.best_weights = value = list(map(tf.constant, value))
    return value


def _get_comparison(callback: Callback, value: Any) -> str | None:
    return None if value is None else str(value.__name__)


def _set_comparison(callback: Callback, value: str | None, name: str) -> None:
    """Do what Keras does at the end of the first epoch, where it also changes the sign of ``min_delta``."""
    if value is not None and callback.monitor_op is None:
        callback.monitor_op = {"less": keras.ops.less, "greater": keras.ops.greater}[value]
        if value == "less":
            callback.min_delta *= -1


def history_text(callback: keras.callbacks.History, value: dict[str, list[Any]]) -> str:
    """Return one text, made once an epoch: a long history would cost more than all else in a commit."""
    epochs = getattr(callback, "epoch", [])
    length, text = getattr(callback, "_hvdrecover_text", (-1, ""))
    if length != len(epochs):
        lists = {name: list(map(_numbers, each)) for name, each in value.items()}
        text = json.dumps([epochs, {name: each for name, each in lists.items() if None not in each}])
        callback._hvdrecover_text = (len(epochs), text)
    return text


def set_history(callback: keras.callbacks.History, value: str, name: str) -> None:
    """Give a callback what `history_text` has returned."""
    callback.epoch, callback.history = json.loads(value)
    callback._hvdrecover_text = (-1, "")


def _numbers(value: Any) -> Any:
    """Return a metric as a number or as lists of numbers; None if it is something else, or large."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    return array.tolist() if array.dtype.kind in "iuf" and array.size <= _MOST_NUMBERS else None


def _get_file(callback: Callback, value: Any) -> int | None:
    """Return the length of a local file; its callback flushes each row."""
    path = Path(callback.filename)
    return path.stat().st_size if path.exists() else None


def _set_file(callback: Callback, value: int | None, name: str) -> None:
    """Remove the rows that were written after the commit. The file is open for appending."""
    path = Path(callback.filename)
    if value is not None and path.exists():
        if path.stat().st_size > value:
            os.truncate(path, value)
        callback.append_header = path.stat().st_size == 0


_GET: Mapping[str, Callable[[Callback, Any], Any]] = {
    "best_weights": _get_weights,
    "monitor_op": _get_comparison,
    "history": history_text,
    "csv_file": _get_file,
}
_SET: Mapping[str, Callable[[Callback, Any, str], None]] = {
    "monitor_op": _set_comparison,
    "history": set_history,
    "csv_file": _set_file,
}


# -- the list in which Keras calls callbacks -----------------------------------------------------------------


def list_of(callback: Callback) -> CallbackList | None:
    """Return the list that is calling a callback; None if something else does.

    Keras hands a callback its model, but not its list. So the list is looked for among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackList) and any(each is callback for each in caller.callbacks):
            return caller
        frame = frame.f_back
    return None


def arrange(
    callback: Callback, first: Sequence[Callback] = (), last: Sequence[Callback] = ()
) -> list[Callback]:
    """Move callbacks to the beginning and to the end of the list that is calling one; return the list."""
    found = list_of(callback)
    if found is None:
        return []
    placed = {id(each) for each in (*first, *last)}
    others = [each for each in found.callbacks if id(each) not in placed]
    found.callbacks = [*first, *others, *last]  # a new list: Keras may be iterating over the old one
    return list(found.callbacks)


def batches_done(callback: Callback, steps: int) -> float:
    """Return how many of an epoch's ``steps`` were done before the ``fit`` that is calling a callback."""
    found = list_of(callback)
    states = [getattr(each, "state", None) for each in (found.callbacks if found is not None else ())]
    tracked = [data for state in states for data in getattr(state, "_datasets", ())]
    if tracked:
        done = part_done(tracked) * steps  # the counter has batches of this number of ranks
        return round(done) if abs(done - round(done)) < 1e-6 else done
    counts = [getattr(state, "batch", None) for state in states]
    return max((count for count in counts if isinstance(count, int)), default=0)


def refuse_backups() -> None:
    """Make each ``fit`` of this process refuse ``BackupAndRestore``, also in a list of lists."""
    BackupAndRestore.on_train_begin = _refuse_backup


def _refuse_backup(callback: Callback, logs: Any = None) -> None:
    raise ConfigError(
        "callbacks",
        "BackupAndRestore would load its own backup over the state that was recovered. Leave it out: the "
        "state's commits replace it",
    )
