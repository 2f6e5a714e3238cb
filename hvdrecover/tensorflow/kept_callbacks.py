"""The state of a ``fit`` that a commit holds beside models and counters: its callbacks', and its metrics'."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras.callbacks import Callback, CSVLogger

from hvdrecover.checkpoint import values
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import World, gather_json
from hvdrecover.tensorflow import known_callbacks as known

logger = logging.getLogger(__name__)

NAME = "_callbacks"  # in a commit, beside the state's attributes
_SCALARS = {type(None), bool, int, float, str}

Record = dict[str, Any]
_PARTS = {"epochs", "stop", "metrics", "callbacks"}


class KeptCallbacks:
    """The part of a commit that belongs to a ``fit``; see `hvdrecover.state.adapter.HiddenAttribute`."""

    def __init__(self) -> None:
        self._held: Record | None = None  # of a fit that has not ended of itself
        self._fit: Fit | None = None

    def tree(self) -> Record | None:
        """The present state of the ``fit`` under way; of one that a fault has ended, its last one."""
        if self._fit is not None:
            self._held = _own(self._fit.record())
        return self._held

    def load(self, tree: Record | None) -> None:
        """Take a commit's; the ``fit`` that resumes from it begins with that.

        Raises:
            ValueError: it is not what `tree` gives.
        """
        if tree is not None and (not isinstance(tree, dict) or not tree.keys() >= _PARTS):
            raise ValueError("the state of Keras's callbacks lacks some of its parts")
        self._held = None if tree is None else _own(tree)
        if self._held is None:
            self._fit = None
        elif self._fit is not None:
            self._fit.take(self._held)

    def resumes(self, epochs: int | None, epoch: int) -> Record | None:
        """Return what a ``fit`` that begins resumes from; None if it is a new one.

        Args:
            epochs: of this ``fit``; None if unknown.
            epoch: of the state.
        """
        held = self._held
        over = epochs is not None and epoch >= epochs
        # Of two fits in a training function, the first may be called again when the second one continues.
        return None if held is not None and over and held["epochs"] != epochs else held

    def begin(self, fit: Fit, resumed: Record | None) -> None:
        """A ``fit`` begins, after what `resumes` gave."""
        self._fit = fit if resumed is not None or self._held is None else None

    def end(self) -> None:
        """A ``fit`` has ended of itself."""
        if self._fit is not None:
            self._fit = self._held = None


class Fit:
    """The callbacks of one call of ``fit``.

    A callback is known by its class, and its number among those of the class. What only some ranks have, such
    as a ``ModelCheckpoint`` on rank 0, is sent to the others, as any rank may be the root of a recovery.

    Args:
        callbacks: all of them, in Keras's order.
        keep: those whose plain attributes are kept.
        epochs: how many there are; None if unknown.
        rank: this rank.

    Attributes:
        stop: whether a callback has ended it.
        metrics: the metrics of all ranks, and the epoch and batch that they are of; None if there are none.
        refused: the attributes in the commit that were not set, by callback; see `known_callbacks.settable`.
    """

    def __init__(
        self, callbacks: Sequence[Callback], keep: Sequence[Callback], epochs: int | None, rank: int
    ) -> None:
        self._named = _named(callbacks, rank)
        self._keep = {id(each) for each in keep}
        self._epochs = epochs
        self._apart: set[str] = set()  # mine that not all ranks have
        self._reopened: list[tuple[CSVLogger, bool]] = []
        self._elsewhere: Record = {}  # states of what other ranks have
        self._began: dict[str, dict[str, Any]] = {}
        self._changed: dict[str, list[str]] = {key: [] for key in self._named}
        self._exchanges = self._exchanges_batches = False  # whether any rank has what not all have
        self.stop = False
        self.metrics: Record | None = None
        self.refused: dict[str, list[str]] = {}

    def reopen(self, record: Record | None) -> None:
        """Before callbacks begin: have files continued that a resumed ``fit`` would write anew."""
        for key, callback in self._named.items():
            if isinstance(callback, CSVLogger):
                callback.append_header = True  # an earlier fit may have continued its file
                if record is not None and key in record["callbacks"]:
                    self._reopened.append((callback, callback.append))
                    callback.append = True

    def join(self, world: World) -> None:
        """Begin, when all callbacks have; learn what the other ranks have.

        Raises:
            ConfigError: some ranks lack what all must have.
        """
        self._began = {key: self._marks(each) for key, each in self._named.items()}
        if world.size() == 1:
            return
        row = {key: [known.is_alike(each), self._changes_by_batch(each)] for key, each in self._named.items()}
        rows = gather_json(world, row, "hvdrecover.callbacks")
        everywhere = set.intersection(*map(set, rows))
        self._apart = row.keys() - everywhere
        apart = {key: facts for row in rows for key, facts in row.items() if key not in everywhere}
        for key, (alike, _) in sorted(apart.items()):
            if alike:
                lacking = next(rank for rank, row in enumerate(rows) if key not in row)
                raise ConfigError(
                    "callbacks",
                    f"rank {lacking} has no {key}, and others have; as it changes what ranks must have in "
                    "common, pass it to fit on all of them",
                )
        self._exchanges, self._exchanges_batches = bool(apart), any(batches for _, batches in apart.values())
        self.exchange(world)

    def exchange(self, world: World, *, within_epoch: bool = False) -> None:
        """Exchange with the other ranks the state of what not all have; all ranks call it."""
        if self._exchanges_batches or (self._exchanges and not within_epoch):
            mine = {key: values.encode(self._entry(key), key) for key in sorted(self._apart)}
            rows = gather_json(world, mine, "hvdrecover.callbacks")
            self._elsewhere = {key: values.decode(entry) for row in rows for key, entry in row.items()}

    def record(self) -> Record:
        """Return what a commit holds of it."""
        entries = {**self._elsewhere, **{key: self._entry(key) for key in self._named}}
        return {
            "epochs": self._epochs,
            "stop": self.stop,
            "metrics": self.metrics,
            "callbacks": {key: entries[key] for key in sorted(entries) if any(entries[key].values())},
        }

    def take(self, record: Record) -> None:
        """Go to what a commit holds, and give callbacks the state that it holds of them."""
        self.stop, self.metrics = record["stop"], _own(record["metrics"])
        others = record["callbacks"].keys() - self._named.keys()
        self._elsewhere = {key: _own(record["callbacks"][key]) for key in others}
        for logger_of_rows, append in self._reopened:
            logger_of_rows.append = append
        self._reopened.clear()
        for key, callback in self._named.items():
            state = _own(record["callbacks"].get(key, {}).get("state", {}))
            known.load(callback, state)
            if id(callback) in self._keep:
                values_to_set = known.settable(callback, state)
                self.refused[key] = sorted(state.keys() - known.kept(callback) - values_to_set.keys())
                for name, value in values_to_set.items():
                    setattr(callback, name, value)

    def forgotten(self, record: Record) -> dict[str, list[str]]:
        """The attributes that had changed since their ``fit`` began and are not kept, by callback."""
        entries = {key: record["callbacks"].get(key, {}) for key in self._named}
        return {
            key: entry["changed"]
            for key, entry in entries.items()
            if entry.get("changed") and id(self._named[key]) not in self._keep
        }

    def _changes_by_batch(self, callback: Callback) -> bool:
        return id(callback) in self._keep or known.counts_batches(callback)

    def _entry(self, key: str) -> Record:
        callback = self._named[key]
        state = known.state_of(callback)
        if id(callback) in self._keep:
            return {"state": {**known.plain(callback), **state}, "changed": []}
        now, changed = self._marks(callback), self._changed[key]
        changed += [
            name for name, mark in now.items() if name not in changed and mark != self._began[key].get(name)
        ]
        return {"state": state, "changed": changed}

    def _marks(self, callback: Callback) -> dict[str, Any]:
        if id(callback) in self._keep:
            return {}
        return {name: _mark(getattr(callback, name)) for name in known.others(callback)}


def _named(callbacks: Sequence[Callback], rank: int) -> dict[str, Callback]:
    """Callbacks by class and number; those with files of each rank's own by the rank, too."""
    found: dict[str, Callback] = {}
    count: Counter[str] = Counter()
    for each in filter(known.matters, callbacks):
        name = type(each).__name__
        count[name] += 1
        number = f"#{count[name]}" if count[name] > 1 else ""
        found[f"{name}{number}@{rank}" if known.is_own(each) else f"{name}{number}"] = each
    return found


def _mark(value: Any) -> Any:
    """Return what tells a plain value from another one, found out fast: of containers, just their size."""
    if type(value) in _SCALARS:
        return repr(value)
    return len(value) if isinstance(value, list | dict | set | tuple) else None


def _own(tree: Any) -> Any:
    """A copy of a tree; tensors, which never change, are shared, and views of arenas become tensors."""
    if type(tree) is dict:
        return {key: _own(item) for key, item in tree.items()}
    if type(tree) is list:
        plain = set(map(type, tree)) <= _SCALARS  # found out fast, for histories are long
        return tree.copy() if plain else [_own(item) for item in tree]
    if isinstance(tree, tf.Tensor):
        return tree
    if isinstance(tree, np.ndarray) and type(tree) is not np.ndarray:
        with tf.device("CPU:0"):
            return tf.constant(np.array(tree, copy=True, subok=False))
    return copy.deepcopy(tree)
