"""Horovod's callbacks for Keras 3, in a ``fit`` of one rank; and the table of Keras's own callbacks."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras.src.callbacks.monitor_callback import MonitorCallback

import hvdrecover.tensorflow.keras as hvd_keras
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.fit import KEPT
from hvdrecover.tensorflow.keras import callbacks, elastic

X = np.ones((12, 2), np.float32)
Y = np.ones((12, 1), np.float32)


class Watch(keras.callbacks.Callback):
    """Notes what a function says after each batch, and may end the training."""

    def __init__(self, look: Any, end: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.look, self.end, self.epoch, self.seen = look, end, 0, []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(self.look())
        if (self.epoch, batch) == self.end:
            raise InterruptedError


@pytest.fixture
def model() -> keras.Model:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9)), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: keras.Model, *used: keras.callbacks.Callback, epochs: int = 2, **options: Any) -> Any:
    return model.fit(X, Y, batch_size=3, epochs=epochs, callbacks=list(used), verbose=0, **options)


def elastic_callbacks(state: Any, every: int = 1) -> list[keras.callbacks.Callback]:
    return [
        elastic.CommitStateCallback(state, every),
        elastic.UpdateBatchStateCallback(state),
        elastic.UpdateEpochStateCallback(state),
    ]


def test_the_state_counts_what_is_done_and_commits_come_after_it(model: keras.Model) -> None:
    state = elastic.KerasState(model, batch=0, epoch=0)
    watch = Watch(lambda: (state.epoch, state.batch, state.last_commit.commit))
    fit(model, *elastic_callbacks(state, 2), watch)
    # One commit after two batches, and one at the end of the epoch, in the place of the one after four.
    first = [(0, 1, 0), (0, 2, 0), (0, 3, 1), (0, 4, 1)]
    assert watch.seen == [*first, *((1, batch, commit + 2) for _, batch, commit in first)]
    assert (state.epoch, state.batch, state.last_commit.commit) == (2, 0, 4)


def test_a_resumed_epoch_has_the_batches_that_are_left(model: keras.Model) -> None:
    state = elastic.KerasState(model, batch=0, epoch=0)
    watch = Watch(lambda: (state.epoch, state.batch), end=(1, 2))
    with pytest.raises(InterruptedError):
        fit(model, *elastic_callbacks(state), watch)
    state.restore()
    assert (state.epoch, state.batch) == (1, 2)
    again = Watch(lambda: (state.epoch, state.batch))
    fit(model, *elastic_callbacks(state), again, epochs=3 - state.epoch)
    assert again.seen == [(1, 3), (1, 4), (2, 1), (2, 2), (2, 3), (2, 4)]
    assert int(model.optimizer.iterations) == 12


def test_the_rate_follows_the_schedule_and_velocities_follow_the_rate(model: keras.Model) -> None:
    schedule = callbacks.LearningRateScheduleCallback(0.5, 0.1)
    velocity = model.optimizer.momentums[0]
    velocity.assign(np.full(velocity.shape, 8.0))
    schedule.set_model(model)
    schedule.on_epoch_begin(1)
    schedule.on_batch_begin(0)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.05)
    assert velocity.numpy().ravel().tolist() == pytest.approx([0.8, 0.8])
    history = fit(model, schedule, epochs=3).history
    assert history["lr"] == pytest.approx([0.5, 0.05, 0.005])


def test_a_fault_right_after_a_resumed_epochs_last_batch_does_not_undo_a_later_stop(
    model: keras.Model,
) -> None:
    state = elastic.KerasState(model, batch=2, epoch=0)
    ours = elastic_callbacks(state)
    with pytest.raises(InterruptedError):
        fit(model, *ours, Watch(lambda: None, end=(0, 1)))
    state.batch = 0
    fit(model, *ours, Watch(lambda: setattr(model, "stop_training", True)))
    assert state.epoch == 1


def test_wrong_arguments_are_refused(model: keras.Model) -> None:
    with pytest.raises(ValueError, match="initial_lr"):
        callbacks.LearningRateScheduleCallback(None, 0.1)
    with pytest.raises(ValueError, match="specify the steps_per_epoch parameter"):
        smooth = callbacks.LearningRateScheduleCallback(0.5, 0.1, staircase=False)
        model.fit(((X, Y) for _ in range(1)), callbacks=[smooth], verbose=0)
    with pytest.raises(ValueError, match="local variables"):
        callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["w"])
    with pytest.raises(ConfigError, match="got 'min'; pass mode by name"):
        callbacks.BestModelCheckpoint("val_loss", 0, "min")  # type: ignore[arg-type]


@pytest.mark.parametrize(("weights", "name"), [(False, "best.keras"), (True, "best.weights.h5")])
def test_the_best_model_goes_where_it_is_told(
    weights: bool, name: str, model: keras.Model, tmp_path: Path
) -> None:
    best = callbacks.BestModelCheckpoint("loss", save_weights_only=weights)
    assert best.filepath is None
    best.filepath = str(tmp_path / name)
    fit(model, best)
    assert (tmp_path / name).exists()


def test_a_loaded_model_has_a_distributed_optimizer_with_its_slots(
    model: keras.Model, tmp_path: Path
) -> None:
    fit(model)
    model.save(tmp_path / "model.keras")
    loaded = hvd_keras.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations) == 8
    with pytest.raises(ConfigError, match=r"^optimizer: .*once"):
        hvd_keras.DistributedOptimizer(loaded.optimizer)
    with pytest.raises(ConfigError, match=r"^legacy_opts: "):
        hvd_keras.load_model(tmp_path / "model.keras", legacy_opts=True)


REFUSED = keras.callbacks.BackupAndRestore
LISTS = keras.callbacks.CallbackList
OF_KERAS = [each for each in vars(keras.callbacks).values() if isinstance(each, type)]
LOOKED_AT = [each for each in (*OF_KERAS, MonitorCallback) if each not in (REFUSED, LISTS)]
# What Keras makes again in each `fit`, or changes back.
LEFT = {
    "Callback": "params _model",
    "MonitorCallback": "min_delta monitor_op",
    "CSVLogger": "append_header writer",
    "EarlyStopping": "",
    "History": "epoch",  # which is kept with it
    "ModelCheckpoint": "_current_epoch",
    "OrbaxCheckpoint": "_current_epoch _async_futures",
    "ProgbarLogger": "seen progbar target verbose epochs _called_in_fit",
    "TensorBoard": "_model _log_write_dir _train_dir _val_dir _writers _should_write_train_graph "
    "_profiler_started _batch_trace_context _is_tracing _should_trace _start_batch _stop_batch "
    "_epoch_start_time _previous_epoch_iterations _train_accumulated_time _batch_start_time "
    "_prev_summary_state _summary_module",
}


def changed_in_a_fit(kind: type) -> set[str]:
    """The attributes of itself that a class's methods set, but for the constructor."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    methods = [each for each in tree.body[0].body if isinstance(each, ast.FunctionDef)]  # type: ignore[attr-defined]
    return {
        node.attr
        for method in methods
        if method.name != "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("kind", LOOKED_AT, ids=lambda kind: kind.__name__)
def test_each_attribute_that_keras_callbacks_change_in_a_fit_is_kept_or_known(kind: Any) -> None:
    names = [base.__name__ for base in kind.__mro__]
    left = {name for base in names for name in LEFT.get(base, "").split()}
    kept = {name for base in names for name in KEPT.get(base, ())}
    assert changed_in_a_fit(kind) - left == changed_in_a_fit(kind) & kept
    assert not kept & left
