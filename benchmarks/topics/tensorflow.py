"""For how long a commit holds up training with TensorFlow and Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover
from benchmarks.measure import Reserve, by_turns, let_clean_up, stopwatch
from benchmarks.rows import Goal, Row
from benchmarks.states import Setting


def measure(setting: Setting) -> list[Row]:
    """A commit that is due, against Horovod's way to keep a model and Keras's own."""
    hvd.init()
    model = _model(setting)
    variables = [*model.variables, *model.optimizer.variables]
    nbytes = sum(variable.value.numpy().nbytes for variable in variables)
    reserve = Reserve(nbytes)
    backup = _backup(model, setting.folder / "backup")  # which begins before the state: that refuses it
    state = recover.TensorFlowKerasState(model, batch=0, checkpoint=str(setting.folder / "root"))
    state.sync()

    @tf.function
    def step() -> None:
        for variable in variables[: len(model.variables)]:
            variable.assign_add(tf.fill(variable.shape, 1e-6))
        for variable in model.optimizer.variables[2:]:
            variable.assign_add(tf.fill(variable.shape, 1e-6))

    def changed(action: Callable[[], object]) -> float:
        step()
        with reserve.freed():
            return stopwatch(action)

    def commit() -> float:
        seconds = changed(state.commit)
        state.flush()
        let_clean_up(state)
        return seconds

    save = _HorovodsSave(model)
    ours, saves, backups = by_turns(
        setting.rounds(7), [commit, lambda: changed(save), lambda: changed(backup)]
    )
    what = "stall of a TensorFlow commit that is due"
    size = f"{nbytes / 1e9:.1f} GB" if nbytes > 5e8 else f"{nbytes / 1e6:.2g} MB"
    title = f"{size}, {len(variables):,} tensors"
    in_ms = ([1e3 * seconds for seconds in values] for values in (ours, saves, backups))
    mine, horovods, kerass = in_ms
    return [
        Row(
            "tensorflow",
            what,
            title,
            "ms",
            mine,
            "Horovod's TensorFlowKerasState.save(), with numpy() of each variable",
            horovods,
            Goal(0.6, 0.45),
        ),
        Row("tensorflow", what, title, "ms", mine, "BackupAndRestore (which writes meanwhile)", kerass),
    ]


def _model(setting: Setting) -> keras.Model:
    shape = setting.shape
    model = keras.Sequential([keras.layers.Dense(shape.width) for _ in range(shape.layers)])
    model.build((None, shape.width))
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


class _HorovodsSave:
    """Do as ``TensorFlowKerasState.save``, which itself fails on Keras 3: keep ``get_weights()``."""

    def __init__(self, model: keras.Model) -> None:
        self._variables = [*model.variables, *model.optimizer.variables]
        self._saved: list[np.ndarray] = []

    def __call__(self) -> None:
        self._saved = [variable.numpy() for variable in self._variables]


def _backup(model: keras.Model, folder: Path) -> Callable[[], None]:
    callback = keras.callbacks.BackupAndRestore(folder, save_freq=1, delete_checkpoint=False)
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return lambda: callback.on_train_batch_end(0)
