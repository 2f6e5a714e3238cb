"""``model.fit`` with the callbacks, in one process: interrupted, it continues as if it had not been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.keras.callbacks import LearningRateScheduleCallback

SAMPLES, BATCH, EPOCHS = 40, 4, 12  # ten batches an epoch
X = np.linspace(-1, 1, SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3)
Y = np.arange(SAMPLES) % 2
# What is judged by: improves at 0, 1, 4; the rate is halved after 3 and 6; training stops after epoch 8.
SCORES = [5.0, 4.0, 6.0, 6.0, 3.0, 7.0, 7.0, 7.0, 7.0, 1.0, 1.0, 1.0]
STOPS = 8
# Where each attempt is interrupted: in an epoch, at its end, and after the last. Then a survivor or a new
# process continues. The user's callbacks are before our commits or behind them.
INTERRUPTIONS = [
    ((0, 6), "a survivor", "before"),
    ((1, None), "a survivor", "before"),
    ((3, None), "a new process", "behind"),
    ((7, 5), "a new process", "before"),
    ((STOPS, None), "a survivor", "behind"),
    ((None, None), "a new process", "before"),
]


class InterruptionError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises at the end of a batch, or of the epoch; or when the training has ended."""

    def __init__(self, state: Any, epoch: int | None, batch: int | None = None) -> None:
        super().__init__()
        self._state, self._at = state, (epoch, batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (self._state.epoch, self._state.batch - 1) == self._at:
            raise InterruptionError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if (epoch, None) == self._at:
            raise InterruptionError

    def on_train_end(self, logs: Any = None) -> None:
        if self._at[0] is None:
            raise InterruptionError


class Counting(keras.callbacks.Callback):  # type: ignore[misc]
    """A user's own, with state."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.names.append(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"names": self.names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.names = state["names"]


def a_state(root: Path | None = None, **options: Any) -> recover.TensorFlowKerasState:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.build((None, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = recover.DistributedOptimizer(keras.optimizers.Adam(0.01))
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy()]
    model.compile(optimizer, loss, **{"metrics": metrics, **options})
    data = recover.elastic_dataset((X, Y), BATCH)
    checkpoint = None if root is None else str(root)
    state = recover.TensorFlowKerasState(model, data=data, epoch=0, batch=0, checkpoint=checkpoint)
    state.sync()
    return state


def fit(
    state: Any, *before: Any, behind: Any = (), every: int | None = 5, epochs: int = EPOCHS, **options: Any
) -> Any:
    options |= {"initial_epoch": state.epoch, "epochs": epochs, "verbose": 0, "shuffle": False}
    callbacks = [*before, *recover.fit_callbacks(state, commit_every_batches=every), *behind]
    return state.model.fit(state.data, callbacks=callbacks, **options)


def weights(state: Any) -> list[bytes]:
    return [each.numpy().tobytes() for each in (*state.model.weights, *state.optimizer.variables)]


def judge() -> keras.callbacks.Callback:
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(score=SCORES[epoch]))


def used(log: Path) -> list[keras.callbacks.Callback]:
    """One of the user's own, and Keras's, which judge by `SCORES`; a real job has those that write models."""
    return [
        Counting(),
        judge(),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau("score", factor=0.5, patience=2, cooldown=1, mode="min"),
        keras.callbacks.EarlyStopping("score", patience=4, mode="min", restore_best_weights=True),
        keras.callbacks.CSVLogger(str(log)),
    ]


def outcome(state: Any, callbacks: list[Any], log: Path) -> dict[str, Any]:
    """Train to the end; return all that the run leaves."""
    history = fit(state, *callbacks)
    return {
        "epoch": state.epoch,
        "weights": weights(state),
        "counted": callbacks[0].names,
        "history": (history.epoch, history.history),
        "rows": log.read_text().splitlines(),
    }


def test_wherever_a_fit_is_interrupted_it_ends_the_same(tmp_path: Path) -> None:
    log, root = tmp_path / "log.csv", tmp_path / "root"
    undisturbed = outcome(a_state(), used(tmp_path / "undisturbed.csv"), tmp_path / "undisturbed.csv")
    rates = undisturbed["history"][1]["learning_rate"]
    assert [epoch for epoch in range(1, len(rates)) if rates[epoch] / rates[epoch - 1] < 0.5] == [4, 7]
    assert undisturbed["epoch"] == len(rates) == STOPS + 1
    state, callbacks = a_state(root), used(log)
    for at, way, place in INTERRUPTIONS:
        interrupted = (*callbacks, Interrupt(state, *at))
        with pytest.raises(InterruptionError):
            fit(state, *interrupted) if place == "before" else fit(state, behind=interrupted)
        if way == "a survivor":
            state.restore()
            state.sync()
        else:
            state.flush()
            state, callbacks = a_state(root), used(log)
    found = outcome(state, callbacks, log)
    for what, value in undisturbed.items():
        assert found[what] == value, what


def test_of_two_fits_the_second_one_continues_though_the_first_is_called_again(tmp_path: Path) -> None:
    def training(state: Any, *interrupt: Any) -> list[int]:
        judged = []
        for epochs in (2, 4):
            stopping = keras.callbacks.EarlyStopping("score", patience=9, mode="min")
            fit(state, judge(), stopping, *interrupt, every=None, epochs=epochs)
            judged.append(stopping.wait)
        return judged

    undisturbed = training(a_state())
    state = a_state(tmp_path)
    with pytest.raises(InterruptionError):
        training(state, Interrupt(state, 3, 2))
    state.flush()
    assert training(a_state(tmp_path))[1] == undisturbed[1] == 1


def test_a_commit_sets_only_known_attributes(tmp_path: Path) -> None:
    """Whoever can write to the root must not choose where the script's callbacks write, or what they do."""
    state = a_state()
    saves = keras.callbacks.ModelCheckpoint(str(tmp_path / "mine.weights.h5"), save_weights_only=True)
    with pytest.raises(InterruptionError):
        fit(state, saves, Interrupt(state, 2, 8))
    state.restore()
    tree = state._fit.tree()
    elsewhere = str(tmp_path / "theirs.weights.h5")
    tree["callbacks"]["ModelCheckpoint"]["state"] |= {"filepath": elsewhere, "_save_model": None}
    state._fit.load(tree)
    fit(state, saves)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.weights.h5"]


def test_a_list_of_keras_own_is_put_in_order_too() -> None:
    state, order = a_state(), []
    told = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: order.append((state.epoch, state.last_commit.commit))
    )
    mine = [told, *recover.fit_callbacks(state)]
    found = keras.callbacks.CallbackList(mine, add_history=True, model=state.model, epochs=1)
    state.model.fit(state.data, callbacks=found, verbose=0)
    assert order == [(1, 0)]  # counted, and not committed yet
    assert state.last_commit.commit == 1


def test_several_steps_in_one_execution_are_all_counted(tmp_path: Path) -> None:
    state = a_state(steps_per_execution=4)
    counted: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: counted.append(state.batch))
    fit(state, count, epochs=1, every=None)
    assert counted[:2] == [4, 8]
    assert (state.epoch, state.batch) == (1, 0)
    assert state.data.order.done == SAMPLES


def test_weights_of_classes_add_no_step() -> None:
    state = a_state()
    fit(state, epochs=3, class_weight={0: 1.0, 1: 2.0})
    assert int(state.optimizer.iterations) == 3 * SAMPLES // BATCH


class Largest(keras.metrics.Mean):  # type: ignore[misc]
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign(tf.maximum(self.total, tf.reduce_max(y_pred)))
        self.count.assign(1.0)


def test_after_a_fault_in_an_epoch_each_batch_tells_of_the_same_metrics() -> None:
    def told_by(state: Any, *interrupt: Any) -> Any:
        told: dict[int, Any] = {}
        note = keras.callbacks.LambdaCallback()
        note.on_train_batch_end = lambda batch, logs=None: told.update({state.batch: dict(logs)})
        return told, fit(state, note, *interrupt, epochs=1).history

    undisturbed, state = a_state(metrics=["accuracy", Largest()]), a_state(metrics=["accuracy", Largest()])
    expected, history = told_by(undisturbed)
    with pytest.raises(InterruptionError):
        told_by(state, Interrupt(state, 0, 7))
    state.restore()
    assert told_by(state) == ({batch: expected[batch] for batch in range(6, 11)}, history)


def fit_with_a_rate_for_each_batch(state: Any, *extra: Any) -> None:
    schedule = LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, staircase=False)
    fit(state, schedule, *extra, epochs=2)


def fit_with_a_tracked_data_set_to_validate_on(state: Any, *extra: Any) -> None:
    """It is tracked so that it is dealt out again when ranks come or go. Training leaves its cursor alone."""
    if not hasattr(state, "validation"):
        state.validation = recover.elastic_dataset((X[:20], Y[:20]), BATCH, shuffle=False)
        state.sync()
    begun, tested = state.epoch, []
    count = keras.callbacks.LambdaCallback()
    count.on_test_batch_end = lambda batch, logs=None: tested.append(batch)  # type: ignore[method-assign]
    fit(state, count, *extra, epochs=2, validation_data=state.validation)
    assert tested == [*range(20 // BATCH)] * (2 - begun)
    assert state.validation.order.done == 0


@pytest.mark.parametrize(
    "train", [fit_with_a_rate_for_each_batch, fit_with_a_tracked_data_set_to_validate_on]
)
def test_a_fit_that_is_interrupted_in_an_epoch_ends_the_same(train: Callable[..., None]) -> None:
    undisturbed, state = a_state(), a_state()
    train(undisturbed)
    with pytest.raises(InterruptionError):
        train(state, Interrupt(state, 1, 5))
    state.restore()
    assert (state.epoch, state.batch) == (1, 5)
    train(state)
    assert weights(state) == weights(undisturbed)


def test_a_resumed_epoch_takes_back_the_rates_of_several_optimizers_in_one() -> None:
    state, rates = a_state(), [keras.Variable(0.5), keras.Variable(0.25)]
    state.batch, model = 3, SimpleNamespace(optimizer=SimpleNamespace())
    model.optimizer.optimizers = [SimpleNamespace(learning_rate=each) for each in rates]
    progress, commit = recover.fit_callbacks(state, average_metrics=False)
    for each in (progress, commit):
        each.set_model(model)
    progress.on_epoch_begin(0)
    for rate in rates:  # as the user's callback between the two does
        rate.assign(rate * 0.1)
    commit.on_epoch_begin(0)
    assert [float(rate) for rate in rates] == [0.5, 0.25]


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "epoch", "callbacks", "options"),
    [
        ("initial_epoch: ", 2, [], {"epochs": 4}),
        ("steps_per_epoch: ", 0, [], {"steps_per_epoch": 4}),
        ("callbacks: BackupAndRestore", 0, [keras.callbacks.BackupAndRestore("never made")], {}),
    ],
)
def test_a_fit_that_would_undo_a_recovery_is_refused(
    name: str, epoch: int, callbacks: list[Any], options: dict[str, Any]
) -> None:
    state = a_state()
    state.epoch, used = epoch, [*callbacks, *recover.fit_callbacks(state)]
    with pytest.raises(ConfigError, match=f"^{name}"):
        state.model.fit(state.data, callbacks=used, verbose=0, **options)


def test_an_optimizer_of_a_later_compile_is_refused_unless_it_is_the_states() -> None:
    state = a_state()
    state.model.compile(state.optimizer, state.model.loss)
    fit(state, epochs=1)
    state.model.compile(recover.DistributedOptimizer(keras.optimizers.Adam(0.1)), state.model.loss)
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*model\.compile\(state\.optimizer"):
        fit(state, epochs=2)
    state.model.optimizer.build(state.model.trainable_variables)
    state.optimizer = state.model.optimizer
    fit(state, epochs=2)
    assert int(state.optimizer.iterations) == SAMPLES // BATCH


@pytest.mark.parametrize(
    ("attributes", "every", "name"),
    [
        ({"epoch": 0}, None, r"state\.batch"),
        ({"batch": 0}, None, r"state\.epoch"),
        ({"epoch": 0, "batch": 0}, 0, "commit_every_batches"),
        ({"epoch": 0, "batch": 0, "virtual_ranks": 1}, None, r"model\.fit"),
    ],
)
def test_a_state_or_an_interval_that_does_not_do_is_refused(attributes: Any, every: Any, name: str) -> None:
    state = recover.TensorFlowState([tf.Variable(1.0)], **attributes)
    with pytest.raises(ConfigError, match=f"^{name}: "):
        recover.fit_callbacks(state, commit_every_batches=every)
