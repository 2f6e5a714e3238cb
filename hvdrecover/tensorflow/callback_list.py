"""The list in which Keras calls the callbacks of a ``fit``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from keras.callbacks import BackupAndRestore, Callback, CallbackList

from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.dataset import part_done


def list_of(callback: Callback) -> CallbackList | None:
    """The list that is calling a callback; None if something else does.

    Keras hands a callback its model and never its list, so that is looked for among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, CallbackList) and any(each is callback for each in caller.callbacks):
            return caller
        frame = frame.f_back
    return None


def arrange(callbacks: CallbackList, first: Sequence[Callback] = (), last: Sequence[Callback] = ()) -> None:
    """Have some callbacks be called before all others and some after them, wherever they stand."""
    placed = {id(each) for each in (*first, *last)}
    others = [each for each in callbacks.callbacks if id(each) not in placed]
    callbacks.callbacks = [*first, *others, *last]  # a new list: Keras may be going through the old one


def refuse_backups() -> None:
    """Have each ``fit`` of this process refuse ``BackupAndRestore``, however it comes to be called."""
    BackupAndRestore.on_train_begin = _refuse_backup


def _refuse_backup(callback: Callback, logs: Any = None) -> None:
    raise ConfigError(
        "callbacks",
        "BackupAndRestore would load its own backup over the state that was recovered. Leave it out: the "
        "state's commits replace it",
    )


def batches_done(callback: Callback, steps: int) -> float:
    """Return how many batches of the epoch that begins were done before this ``fit``.

    Args:
        callback: which is being called.
        steps: batches of a whole epoch.
    """
    found = list_of(callback)
    states = [getattr(each, "state", None) for each in (found.callbacks if found is not None else ())]
    tracked = [data for state in states for data in getattr(state, "_datasets", ())]
    if tracked:
        done = part_done(tracked) * steps  # the same part of an epoch, also where it was done by other ranks
        return round(done) if abs(done - round(done)) < 1e-6 else done
    counts = [getattr(state, "batch", None) for state in states]
    return max((count for count in counts if isinstance(count, int)), default=0)
