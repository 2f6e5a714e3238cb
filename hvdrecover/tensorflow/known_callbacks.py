"""Keras's own callbacks: which of their attributes change during a ``fit``, and so are part of a commit.

A resumed ``fit`` calls `on_train_begin` once more, in which most of them begin anew.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.callbacks import Callback

from hvdrecover.checkpoint import values
from hvdrecover.errors import UnsupportedValueError

Values = dict[str, Any]
_NUMBERS = bool | int | float | np.number


@dataclass(frozen=True)
class Known:
    """The attributes of a class of callbacks, without those of its base classes.

    Attributes:
        kept: they are part of a commit.
        left: they are not: the script's settings, and what a ``fit`` makes anew.
        alike: whether all ranks must have it, as it changes weights or learning rates.
        own: whether each rank has files of its own.
    """

    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    alike: bool = False
    own: bool = False


def _known(kept: str = "", left: str = "", *, alike: bool = False, own: bool = False) -> Known:
    return Known(tuple(kept.split()), tuple(left.split()), alike, own)


KNOWN: dict[str, Known] = {
    "Callback": _known(left="params _model"),
    "MonitorCallback": _known("best monitor_op", "monitor mode min_delta"),
    "CSVLogger": _known("keys csv_file", "sep filename append append_header writer", own=True),
    "EarlyStopping": _known(
        "best monitor_op wait stopped_epoch best_epoch best_weights",
        "patience verbose baseline restore_best_weights start_from_epoch",
        alike=True,
    ),
    "History": _known("history", "epoch"),  # which is kept with it
    "LambdaCallback": _known(
        left="on_epoch_begin on_epoch_end on_train_begin on_train_end on_train_batch_begin on_train_batch_end"
    ),
    "LearningRateScheduler": _known(left="schedule verbose", alike=True),
    "ModelCheckpoint": _known(
        "best monitor_op _batches_seen_since_last_saving _last_batch_seen",
        "verbose filepath save_best_only save_weights_only save_freq _current_epoch",
    ),
    "OrbaxCheckpoint": _known(
        "best monitor_op _batches_seen_since_last_saving _last_batch_seen _total_batches_seen",
        "directory verbose save_best_only save_freq max_to_keep save_on_background save_weights_only "
        "_async_futures _multihost_initialized checkpointer",
    ),
    "ProgbarLogger": _known(left="seen progbar target verbose epochs _called_in_fit"),
    "ReduceLROnPlateau": _known(
        "best monitor_op wait cooldown_counter", "factor min_lr patience verbose cooldown", alike=True
    ),
    "RemoteMonitor": _known(left="root path field headers send_as_json"),
    "SwapEMAWeights": _known("_ema_weights_in_model", "swap_on_epoch", alike=True),
    "TensorBoard": _known(
        "_global_train_batch _global_test_batch",
        "log_dir histogram_freq write_graph write_images write_steps_per_second update_freq embeddings_freq "
        "embeddings_metadata _previous_epoch_iterations _train_accumulated_time _batch_start_time "
        "_summary_module _writers _prev_summary_state _model _log_write_dir _train_dir _val_dir "
        "_should_write_train_graph _profiler_started _batch_trace_context _is_tracing _should_trace "
        "_start_batch _stop_batch _epoch_start_time",
    ),
    "TerminateOnNaN": _known(left="raise_error"),
}
"""Keras's callbacks by name, as older versions lack some; all but ``BackupAndRestore``, which is refused."""


class Weights(list[Any]):
    """Arrays, such as those of ``model.get_weights()``, over the memory of tensors of the host.

    Args:
        found: arrays or tensors; arrays are copied.

    Attributes:
        tensors: the tensors.
    """

    def __init__(self, found: Sequence[Any]) -> None:
        with tf.device("CPU:0"):
            self.tensors = [each if isinstance(each, tf.Tensor) else tf.constant(each) for each in found]
        super().__init__(each._numpy() for each in self.tensors)


def state_of(callback: Callback) -> Values:
    """The kept attributes of a callback: plain values and tensors."""
    found = {name: getattr(callback, name) for name in kept(callback) if name in vars(callback)}
    return {name: _PACK[name](callback, value) if name in _PACK else value for name, value in found.items()}


def load(callback: Callback, state: Values) -> None:
    """Give a callback the state that another of its class had."""
    for name in kept(callback):
        if name in state:
            if name in _UNPACK:
                _UNPACK[name](callback, state[name])
            else:
                setattr(callback, name, state[name])


def kept(callback: Callback) -> list[str]:
    """The names of the attributes that are part of a commit."""
    names = [name for known in _classes(callback) for name in known.kept]
    return list(dict.fromkeys([*(_of_ours(callback) or ()), *names]))


def is_alike(callback: Callback) -> bool:
    """Return whether all ranks must have a callback."""
    return any(known.alike for known in _classes(callback))


def is_own(callback: Callback) -> bool:
    """Return whether each rank's callback has a file of its own."""
    return any(known.own for known in _classes(callback))


def counts_batches(callback: Callback) -> bool:
    """Return whether a callback of Keras's changes within an epoch, in a way that matters."""
    frequency = getattr(callback, "save_freq", getattr(callback, "update_freq", "epoch"))
    return bool(kept(callback)) and frequency != "epoch"


def matters(callback: Callback) -> bool:
    """Return whether a callback may have anything that a commit should know of."""
    unknown = not _is_known(type(callback)) and _of_ours(callback) is None
    return bool(kept(callback)) or is_alike(callback) or unknown


def plain(callback: Callback) -> Values:
    """The attributes that are not in the table, and that a state could hold as plain objects."""
    found = {}
    for name in others(callback):
        try:
            values.encode(value := getattr(callback, name), name)
        except UnsupportedValueError:
            continue
        found[name] = value
    return found


def settable(callback: Callback, state: Values) -> Values:
    """The values that may be set again: of attributes that `plain` gives, each of the kind that it has.

    A commit's values can be anybody's who can write to the root.
    """
    mine = plain(callback)
    return {name: value for name, value in state.items() if name in mine and _is_alike(mine[name], value)}


def _is_alike(mine: Any, stored: Any) -> bool:
    """Return whether a value may take another one's place; of files, only one in the same folder may."""
    if mine is None or stored is None:
        return True
    if isinstance(mine, _NUMBERS):
        return isinstance(stored, _NUMBERS)
    same = type(mine) is type(stored)
    return same and (not isinstance(mine, str | PurePath) or PurePath(mine).parent == PurePath(stored).parent)


def others(callback: Callback) -> list[str]:
    """The names of the attributes that are not in the table."""
    if _of_ours(callback) is not None:
        return []
    named = {name for known in _classes(callback) for name in (*known.kept, *known.left)}
    return [name for name in vars(callback) if name not in named]


def _of_ours(callback: Callback) -> tuple[str, ...] | None:
    """The kept attributes of a callback of hvdrecover's; None of others."""
    found: tuple[str, ...] | None = getattr(type(callback), "_hvdrecover_kept", None)
    return found


def _classes(callback: Callback) -> list[Known]:
    """Return what is known of a callback's classes, the most derived one first."""
    return [KNOWN[each.__name__] for each in type(callback).__mro__ if _is_known(each)]


def _is_known(kind: type) -> bool:
    return kind.__name__ in KNOWN and kind.__module__.startswith("keras.")


# -- attributes that are not plain -------------------------------------------------------------------------


def _pack_weights(callback: Callback, value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Weights):
        callback.best_weights = value = Weights(value)  # not held twice
    return value.tensors


def _unpack_weights(callback: Callback, value: Any) -> None:
    callback.best_weights = None if value is None else Weights(value)


def _pack_comparison(callback: Callback, value: Any) -> str | None:
    return None if value is None else str(value.__name__)


def _unpack_comparison(callback: Callback, value: str | None) -> None:
    """Keras finds it out at the end of an epoch, and turns ``min_delta`` round by it."""
    if value is not None and callback.monitor_op is None:
        callback.monitor_op = {"less": keras.ops.less, "greater": keras.ops.greater}[value]
        if value == "less":
            callback.min_delta *= -1


_MOST_NUMBERS = 1000  # of an array in a history, all of which is part of each commit


def _pack_history(callback: Callback, value: dict[str, list[Any]]) -> str:
    """As one text, made once an epoch: a long history would cost each commit more than all else."""
    epochs = getattr(callback, "epoch", [])
    now = (len(epochs), repr({name: each[-1:] for name, each in value.items()}))
    known = _histories.get(callback)
    if known is None or known[0] != now:
        lists = {name: list(map(_plain, each)) for name, each in value.items()}
        numbers = {name: each for name, each in lists.items() if None not in each}
        known = _histories[callback] = (now, json.dumps([epochs, numbers]))
    return known[1]


def _plain(value: Any) -> Any:
    """Return a metric's value as JSON has it: a number, or a small array as lists; None for all else."""
    if isinstance(value, int | float):
        return value
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):
        return None
    return array.tolist() if array.dtype.kind in "iuf" and array.size <= _MOST_NUMBERS else None


def _unpack_history(callback: Callback, value: str) -> None:
    callback.epoch, callback.history = json.loads(value)


_histories: weakref.WeakKeyDictionary[Callback, tuple[Any, str]] = weakref.WeakKeyDictionary()


def _pack_file(callback: Callback, value: Any) -> int | None:
    """The length of a file on a disk that is written to by its callback, each row at once."""
    path = Path(callback.filename)
    return path.stat().st_size if path.exists() else None


def _unpack_file(callback: Callback, value: int | None) -> None:
    """Take back the rows that were written since the commit; the file is open for appending."""
    path = Path(callback.filename)
    if value is None or not path.exists():
        return
    if path.stat().st_size >= value and _ends_a_row(path, value):
        os.truncate(path, value)
    callback.append_header = path.stat().st_size == 0


def _ends_a_row(path: Path, length: int) -> bool:
    if length == 0:
        return True
    with path.open("rb") as file:
        file.seek(length - 1)
        return file.read(1) == b"\n"


_PACK: dict[str, Callable[[Callback, Any], Any]] = {
    "best_weights": _pack_weights,
    "monitor_op": _pack_comparison,
    "history": _pack_history,
    "csv_file": _pack_file,
}
_UNPACK: dict[str, Callable[[Callback, Any], None]] = {
    "best_weights": _unpack_weights,
    "monitor_op": _unpack_comparison,
    "history": _unpack_history,
    "csv_file": _unpack_file,
}
