"""Steps of Keras optimizers whose gradients are not finite, in a job of one."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, NumericsError
from hvdrecover.guard.numbers import RolledBack
from hvdrecover.tensorflow.averaging import sums_of


def a_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(2, name="one", use_bias=False)], name="net")
    model.build((None, 2))
    return model


def joined(model: keras.Model, optimizer: Any, **guard: Any) -> recover.TensorFlowKerasState:
    data = recover.elastic_dataset(np.zeros(8), 2)
    state = recover.TensorFlowKerasState(model, optimizer, data=data, guard=recover.Guard(**guard))
    state.sync()
    return state


def a_step(model: keras.Model, optimizer: Any, factor: float, *, tape: bool = True) -> None:
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(model(tf.ones([1, 2]))) * factor
    source = recover.DistributedGradientTape(recorded) if tape else recorded
    variables = model.trainable_variables
    optimizer.apply(source.gradient(loss, variables), variables)


def steps_of(model: keras.Model, optimizer: Any, graph: bool, *, tape: bool = True) -> Any:
    """A step as a function of a tensor, the loss's factor."""

    def step(factor: tf.Tensor) -> None:
        a_step(model, optimizer, factor, tape=tape)

    return tf.function(step) if graph else step


@pytest.mark.parametrize("way", ["tape", "optimizer"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_a_bad_step_is_applied_by_no_optimizer(way: str, graph: bool, kind: Any) -> None:
    model, optimizer = a_model(), kind(0.5)
    if way == "optimizer":
        optimizer = recover.DistributedOptimizer(optimizer)
    joined(model, optimizer, numerics="skip")
    step = steps_of(model, optimizer, graph, tape=way == "tape")
    step(tf.constant(1.0))
    before, slots = model.get_weights(), [each.numpy() for each in optimizer.variables]
    step(tf.constant(np.inf))
    assert np.array_equal(model.get_weights(), before)
    assert all(map(np.array_equal, slots, [each.numpy() for each in optimizer.variables]))
    step(tf.constant(1.0))
    assert not np.array_equal(model.get_weights(), before)
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("policy", ["raise", "rollback"])
def test_a_bad_step_that_ends_in_an_error_is_not_applied(policy: Any, graph: bool) -> None:
    model, optimizer = a_model(), keras.optimizers.Adam(0.5)
    joined(model, optimizer, numerics=policy)
    step = steps_of(model, optimizer, graph)
    step(tf.constant(1.0))
    before = [each.numpy() for each in (*model.variables, *optimizer.variables)]
    for _ in range(10):
        with pytest.raises((NumericsError, RolledBack, tf.errors.OpError)):
            step(tf.constant(np.nan))
        after = [each.numpy() for each in (*model.variables, *optimizer.variables)]
        assert all(map(np.array_equal, before, after))
    step(tf.constant(1.0))
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_large_gradients_are_applied(policy: Any, graph: bool) -> None:
    model, optimizer = a_model(), keras.optimizers.SGD(1.0)
    joined(model, optimizer, numerics=policy)
    step = steps_of(model, optimizer, graph)
    step(tf.constant(1e30))
    assert np.abs(model.get_weights()[0]).max() > 1e29


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_xla_is_refused(policy: Any) -> None:
    model, optimizer = a_model(), keras.optimizers.SGD(0.5)
    joined(model, optimizer, numerics=policy)
    step = tf.function(functools.partial(a_step, model, optimizer), jit_compile=True, autograph=False)
    with pytest.raises(ConfigError, match=r"^jit_compile: .* guard .*jit_compile=False"):
        step(tf.constant(1.0))


def test_gradients_that_nobody_has_averaged_are_nobodys_business() -> None:
    model, optimizer = a_model(), keras.optimizers.SGD(1.0)
    joined(model, optimizer)
    a_step(model, optimizer, np.nan, tape=False)
    assert np.isnan(model.get_weights()[0]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_a_sum_tells_whether_all_numbers_are_finite(dtype: str, bad: float) -> None:
    tensors = [tf.zeros([0, 5], dtype), tf.ones([70, 1000], dtype), tf.cast([1.0, bad, 1.0], dtype)]
    assert np.isfinite(sums_of(tensors).numpy()).tolist() == [True, True, False]
