"""Optimizers of one rank, and their steps whose gradients are not finite."""

from __future__ import annotations

import functools
from pathlib import Path
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


def a_step(model: keras.Model, optimizer: Any, factor: float, *, tape: bool = True) -> None:
    with tf.GradientTape() as recorded:
        loss = tf.reduce_sum(model(tf.ones([1, 2]))) * factor
    source = recover.DistributedGradientTape(recorded) if tape else recorded
    variables = model.trainable_variables
    optimizer.apply(source.gradient(loss, variables), variables)


def contents(*components: Any) -> list[bytes]:
    return [variable.numpy().tobytes() for each in components for variable in each.variables]


def test_all_ranks_forget_passes_when_they_agree_also_the_one_whose_state_they_take() -> None:
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = a_model()
    state = recover.TensorFlowKerasState(model, optimizer)
    state.sync()
    before = contents(model)
    a_step(model, optimizer, 1.0, tape=False)
    state.sync()
    a_step(model, optimizer, 1.0, tape=False)
    assert contents(model) == before  # the first of two passes again
    a_step(model, optimizer, 1.0, tape=False)
    assert contents(model) != before


def test_a_saved_model_has_a_plain_optimizer(tmp_path: Path) -> None:
    model = a_model()
    model.compile(recover.DistributedOptimizer(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    model.fit(np.ones((8, 2)), np.ones((8, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    assert contents(loaded.optimizer) == contents(model.optimizer)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda: recover.DistributedOptimizer(keras.optimizers.SGD(0.1)), {}),
        (lambda: "sgd", {}),
        (lambda: keras.optimizers.SGD(0.1), {"backward_passes_per_step": 0}),
    ],
)
def test_an_optimizer_that_cannot_be_made_distributed_is_refused(optimizer: Any, options: Any) -> None:
    with pytest.raises(ConfigError):
        recover.DistributedOptimizer(optimizer(), **options)


def test_loss_scaling_around_it_is_refused() -> None:
    """It would skip steps on some of the ranks only."""
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=2.0))
    assert optimizer.loss_scale_factor == 2.0
    with pytest.raises(ConfigError, match=r"DistributedOptimizer\(LossScaleOptimizer"):
        keras.optimizers.LossScaleOptimizer(optimizer)
    model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")], name="mixed")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(ConfigError, match=r"^optimizer: .*mixed_float16"):
        model.compile(optimizer, "mse")
    model.compile(
        recover.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), "mse"
    )


def guarded(optimizer: Any, **guard: Any) -> keras.Model:
    model, data = a_model(), recover.elastic_dataset(np.zeros(8), 2)
    recover.TensorFlowKerasState(model, optimizer, data=data, guard=recover.Guard(**guard)).sync()
    return model


def steps_of(model: keras.Model, optimizer: Any, graph: bool, *, tape: bool = True) -> Any:
    """A step as a function of a tensor, the loss's factor."""
    step = functools.partial(a_step, model, optimizer, tape=tape)
    return tf.function(step) if graph else step


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(
    ("policy", "tape"), [("skip", True), ("skip", False), ("raise", True), ("rollback", True)]
)
def test_a_bad_step_is_not_applied(policy: Any, tape: bool, graph: bool) -> None:
    optimizer = (
        keras.optimizers.Adam(0.5) if tape else recover.DistributedOptimizer(keras.optimizers.Adam(0.5))
    )
    model = guarded(optimizer, numerics=policy)
    step = steps_of(model, optimizer, graph, tape=tape)
    step(tf.constant(1.0))
    before = contents(model, optimizer)
    for _ in range(10):
        if policy == "skip":
            step(tf.constant(np.inf))
        else:
            with pytest.raises((NumericsError, RolledBack, tf.errors.OpError)):
                step(tf.constant(np.nan))
        assert contents(model, optimizer) == before
    step(tf.constant(1.0))
    assert contents(model) != before[: len(model.variables)]
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_large_gradients_are_applied(policy: Any, graph: bool) -> None:
    optimizer = keras.optimizers.SGD(1.0)
    model = guarded(optimizer, numerics=policy)
    steps_of(model, optimizer, graph)(tf.constant(1e30))
    assert np.abs(model.get_weights()[0]).max() > 1e29


def test_xla_is_refused() -> None:
    optimizer = keras.optimizers.SGD(0.5)
    step = functools.partial(a_step, guarded(optimizer), optimizer)
    with pytest.raises(ConfigError, match=r"^jit_compile: .* guard .*jit_compile=False"):
        tf.function(step, jit_compile=True, autograph=False)(tf.constant(1.0))


def test_gradients_that_are_not_averaged_are_not_looked_at() -> None:
    optimizer = keras.optimizers.SGD(1.0)
    model = guarded(optimizer)
    a_step(model, optimizer, np.nan, tape=False)
    assert np.isnan(model.get_weights()[0]).all()


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "complex64"])
def test_a_sum_tells_whether_all_numbers_are_finite(dtype: str, bad: float) -> None:
    tensors = [tf.zeros([0, 5], dtype), tf.ones([70, 1000], dtype), tf.cast([1.0, bad, 1.0], dtype)]
    assert np.isfinite(sums_of(tensors).numpy()).tolist() == [True, True, False]
