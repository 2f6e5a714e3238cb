"""``model.fit`` with the callbacks, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.fit import scaled
from hvdrecover.tensorflow.keras.callbacks import LearningRateScheduleCallback

SAMPLES, BATCH = 40, 4  # ten batches an epoch
X = np.linspace(-1, 1, SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3)
Y = np.arange(SAMPLES) % 2


class InterruptionError(Exception):
    pass


class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises when so many batches have been done in all."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._left = after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            raise InterruptionError


def a_state(root: Path | None = None, **options: Any) -> recover.TensorFlowKerasState:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.build((None, 3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        recover.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"], **options
    )
    data = recover.elastic_dataset((X, Y), BATCH)
    checkpoint = None if root is None else str(root)
    return recover.TensorFlowKerasState(
        model, data=data, epoch=0, batch=0, learning_rate=0.01, checkpoint=checkpoint
    )


def fit(state: Any, *extra: Any, epochs: int = 3, every: int | None = 3, **options: Any) -> Any:
    found = [*recover.fit_callbacks(state, commit_every_batches=every, **options), *extra]
    return state.model.fit(
        state.data, epochs=epochs, initial_epoch=state.epoch, callbacks=found, verbose=0, shuffle=False
    )


def weights(state: Any) -> list[bytes]:
    variables = [*state.model.trainable_variables, *state.optimizer.variables]
    return [variable.numpy().tobytes() for variable in variables]


@pytest.fixture(scope="module")
def undisturbed() -> list[bytes]:
    state = a_state()
    state.sync()
    fit(state)
    assert (state.epoch, state.batch) == (3, 0)
    return weights(state)


@pytest.mark.parametrize("after", [10, 15])
def test_fit_that_was_interrupted_continues_inside_the_epoch_and_ends_with_the_same_bits(
    tmp_path: Path, undisturbed: list[bytes], after: int
) -> None:
    state = a_state(tmp_path)
    state.sync()
    with pytest.raises(InterruptionError):
        fit(state, Interrupt(after))
    state.flush()
    again = a_state(tmp_path)
    keras.utils.set_random_seed(99)  # what a new process has drawn before must not matter
    again.sync()
    epoch, batch = divmod(after - 1, 10)  # the commit of a batch comes after all callbacks
    assert (again.epoch, again.batch) == (epoch, batch // 3 * 3)
    at_the_end = again.epoch > 0 and not again.batch  # the next epoch is gone to when it begins
    assert again.data.order.done == (SAMPLES if at_the_end else again.batch * BATCH)
    fit(again)
    assert weights(again) == undisturbed


def test_several_steps_in_one_execution_are_all_counted(tmp_path: Path) -> None:
    state = a_state(steps_per_execution=4)
    state.sync()
    counted = []
    fit(
        state,
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: counted.append(state.batch)),
        epochs=1,
        every=None,
    )
    assert counted[:2] == [4, 8]
    assert (state.epoch, state.batch) == (1, 0)
    assert state.data.order.done == SAMPLES


def test_one_rank_validates_warms_up_and_writes_for_tensorboard(tmp_path: Path) -> None:
    state = a_state()
    state.sync()
    found = recover.fit_callbacks(state, warmup_epochs=2, tensorboard=str(tmp_path))
    state.model.fit(state.data, validation_data=(X, Y), epochs=1, callbacks=found, verbose=0)
    assert (state.epoch, state.data.order.done) == (1, SAMPLES)  # validation does not move the cursor
    assert float(state.optimizer.learning_rate) == pytest.approx(0.01)  # the rate of one rank is its own
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def test_a_tracked_data_set_to_validate_on_is_gone_through_each_time() -> None:
    """It is tracked to be dealt out anew when ranks come or go; training has no part in its cursor."""

    def made() -> recover.TensorFlowKerasState:
        state = a_state()
        state.validation = recover.elastic_dataset((X[:20], Y[:20]), BATCH, shuffle=False)
        state.sync()
        return state

    def trained(state: Any, *extra: Any) -> None:
        found = [*recover.fit_callbacks(state, commit_every_batches=3), count, *extra]
        options = {"validation_data": state.validation, "callbacks": found, "verbose": 0, "shuffle": False}
        state.model.fit(state.data, epochs=2, initial_epoch=state.epoch, **options)

    tested: list[int] = []
    count = keras.callbacks.LambdaCallback()
    count.on_test_batch_end = lambda batch, logs=None: tested.append(batch)  # type: ignore[method-assign]
    whole = made()
    trained(whole)
    assert tested == [*range(-(-20 // BATCH))] * 2 and whole.validation.order.done == 0
    state = made()
    with pytest.raises(InterruptionError):
        trained(state, Interrupt(17))
    state.restore()
    trained(state)
    assert weights(state) == weights(whole)


def test_the_part_of_an_epoch_that_was_done_is_the_same_for_any_number_of_ranks() -> None:
    state = a_state()
    schedule = LearningRateScheduleCallback(0.1, lambda epoch: epoch, staircase=False)
    schedule.steps_per_epoch = 5  # of twice as many ranks
    state.data.record_batch(8)
    begun: list[float] = []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: begun.append(schedule._done))
    found = keras.callbacks.CallbackList([schedule, note, *recover.fit_callbacks(state)], model=state.model)
    found.on_epoch_begin(0)
    assert begun == [4]


def test_a_rate_that_changes_with_each_batch_continues_from_where_it_was() -> None:
    def trained(state: Any, *extra: Any) -> list[float]:
        schedule = LearningRateScheduleCallback(0.1, lambda epoch: 1 + epoch, staircase=False)
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: rates.append(float(state.optimizer.learning_rate))
        )
        fit(state, schedule, note, *extra, epochs=2)
        return rates

    rates: list[float] = []
    whole = trained(a_state())
    rates = []
    state = a_state()
    state.sync()
    with pytest.raises(InterruptionError):
        trained(state, Interrupt(15))
    state.restore()
    del rates[10 * state.epoch + state.batch :]
    assert trained(state) == whole


def test_xla_is_switched_off_and_the_user_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told = "jit_compile is switched off"
    state = a_state(jit_compile=True)
    state.sync()
    fit(state, epochs=1)
    assert sum(told in message for message in caplog.messages) == 1
    caplog.clear()
    automatic = a_state()
    automatic.sync()
    fit(automatic, epochs=1)
    assert not any(told in message for message in caplog.messages)
    assert automatic.model.jit_compile is False


@pytest.mark.parametrize(
    ("size", "epochs", "warmup", "rate"),
    [
        (1, 7.0, 5, 0.1),
        (8, 0.0, 5, 0.1),
        (8, 2.5, 5, 0.45),
        (8, 5.0, 5, 0.8),
        (8, 50.0, 5, 0.8),
        (8, 0.0, 0, 0.8),
    ],
)
def test_the_rate_rises_in_a_straight_line_to_that_of_all_ranks(
    size: int, epochs: float, warmup: float, rate: float
) -> None:
    assert scaled(0.1, size, epochs, warmup) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("missing", "options"),
    [("epoch", {}), ("batch", {}), ("learning_rate", {"warmup_epochs": 1.0})],
)
def test_a_state_without_what_is_needed_is_refused(missing: str, options: dict[str, Any]) -> None:
    attributes = {"epoch": 0, "batch": 0, "learning_rate": 0.1}
    del attributes[missing]
    state = recover.TensorFlowState([tf.Variable(1.0)], **attributes)
    with pytest.raises(ConfigError, match=f"state.{missing}"):
        recover.fit_callbacks(state, **options)


@pytest.mark.parametrize("options", [{"commit_every_batches": 0}, {"warmup_epochs": -1.0}])
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    state = recover.TensorFlowState([tf.Variable(1.0)], epoch=0, batch=0, learning_rate=0.1)
    with pytest.raises(ConfigError):
        recover.fit_callbacks(state, **options)


def test_an_epoch_that_was_interrupted_after_its_last_batch_is_ended_and_not_begun_anew(
    tmp_path: Path,
) -> None:
    def raises(epoch: int, logs: Any) -> None:
        raise InterruptionError

    undisturbed = a_state()
    undisturbed.sync()
    fit(undisturbed, every=5)
    state = a_state(tmp_path)
    state.sync()
    with pytest.raises(InterruptionError):
        fit(state, keras.callbacks.LambdaCallback(on_epoch_end=raises), every=5)
    state.flush()
    again = a_state(tmp_path)
    again.sync()
    assert (again.epoch, again.batch) == (0, 5)  # the tenth batch is committed with the epoch's end
    fit(again, every=5)
    assert weights(again) == weights(undisturbed)


def test_averages_of_weights_that_are_swapped_in_continue(tmp_path: Path) -> None:
    def training(state: Any, *others: Any) -> list[bytes]:
        fit(state, keras.callbacks.SwapEMAWeights(swap_on_epoch=True), *others)
        return weights(state)

    def prepared(root: Path | None) -> Any:
        state = a_state()
        optimizer = recover.DistributedOptimizer(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5))
        state.model.compile(optimizer, state.model.loss)
        made = recover.TensorFlowKerasState(
            state.model, data=state.data, epoch=0, batch=0, checkpoint=root and str(root)
        )
        made.sync()
        return made

    undisturbed = training(prepared(None))
    for number, after in enumerate((14, 21)):
        state = prepared(tmp_path / str(number))
        with pytest.raises(InterruptionError):
            training(state, Interrupt(after))
        state.flush()
        assert training(prepared(tmp_path / str(number))) == undisturbed
