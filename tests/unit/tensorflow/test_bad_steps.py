"""Steps of Keras optimizers whose gradients are not finite, in a job of one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import NumericsError


def a_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(2, name="one", use_bias=False)], name="net")
    model.build((None, 2))
    return model


def joined(model: keras.Model, optimizer: Any, **guard: Any) -> recover.TensorFlowKerasState:
    state = recover.TensorFlowKerasState(model, optimizer, guard=recover.Guard(**guard))
    state.sync()
    return state


def a_step(model: keras.Model, optimizer: Any, factor: float, *, tape: bool = True) -> None:
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(model(tf.ones([1, 2]))) * factor
    source = recover.DistributedGradientTape(recorded) if tape else recorded
    variables = model.trainable_variables
    optimizer.apply(source.gradient(loss, variables), variables)


@pytest.mark.parametrize("way", ["tape", "optimizer"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_a_bad_step_is_applied_by_no_optimizer(way: str, graph: bool, kind: Any) -> None:
    model, optimizer = a_model(), kind(0.5)
    if way == "optimizer":
        optimizer = recover.DistributedOptimizer(optimizer)
    joined(model, optimizer, numerics="skip")

    def step(factor: tf.Tensor) -> None:
        a_step(model, optimizer, factor, tape=way == "tape")

    if graph:
        step = tf.function(step)
    step(tf.constant(1.0))
    before, slots = model.get_weights(), [each.numpy() for each in optimizer.variables]
    step(tf.constant(np.inf))
    assert np.array_equal(model.get_weights(), before)
    assert all(map(np.array_equal, slots, [each.numpy() for each in optimizer.variables]))
    step(tf.constant(1.0))
    assert not np.array_equal(model.get_weights(), before)
    assert int(optimizer.iterations) == 2


def test_a_bad_step_is_raised_with_the_variables_name() -> None:
    model, optimizer = a_model(), keras.optimizers.SGD(0.5)
    joined(model, optimizer)
    with pytest.raises((NumericsError, tf.errors.OpError), match=r"gradient of model\.net/one/kernel"):
        a_step(model, optimizer, np.nan)


def test_large_gradients_are_applied() -> None:
    model, optimizer = a_model(), keras.optimizers.SGD(1.0)
    joined(model, optimizer)
    a_step(model, optimizer, 1e30)
    assert np.abs(model.get_weights()[0]).max() > 1e29


def test_gradients_that_nobody_has_averaged_are_nobodys_business() -> None:
    model, optimizer = a_model(), keras.optimizers.SGD(1.0)
    joined(model, optimizer)
    a_step(model, optimizer, np.nan, tape=False)
    assert np.isnan(model.get_weights()[0]).all()


def test_overflows_of_loss_scaling_are_left_to_it() -> None:
    model = a_model()
    optimizer = recover.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0)
    )
    joined(model, optimizer)
    before = model.get_weights()
    a_step(model, optimizer, np.inf, tape=False)
    assert np.array_equal(model.get_weights(), before)
    assert float(optimizer.dynamic_scale) == 2.0


def test_a_watched_optimizer_is_saved_as_what_it_was() -> None:
    optimizer = recover.DistributedOptimizer(keras.optimizers.Adam(0.25))
    joined(a_model(), optimizer)
    kept = keras.optimizers.serialize(optimizer)
    assert kept["class_name"] == "Adam"
    assert type(keras.optimizers.deserialize(kept)) is keras.optimizers.Adam
