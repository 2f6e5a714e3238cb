"""Optimizers of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.optimizer import forget_sums

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.1),
    "clipped": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.5, weight_decay=0.1),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=8.0),
}
X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8) % 2


def a_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    model.build((None, 3))
    for place, variable in enumerate(model.trainable_variables):
        count = int(np.prod(variable.shape))
        variable.assign(np.linspace(-1, 1 + place, count).reshape(variable.shape))
    return model


def loss_of(model: keras.Model, x: Any, y: Any) -> tf.Tensor:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True))
    return tf.reduce_mean(losses)


def steps(model: keras.Model, optimizer: Any, batches: list[Any], *, graph: bool) -> list[np.ndarray]:
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(loss_of(model, x, y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(step) if graph else step
    for x, y in batches:
        run(tf.constant(x), tf.constant(y))
    return [variable.numpy() for variable in model.trainable_variables]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def close(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_rank_trains_as_without_us(kind: str, graph: bool) -> None:
    batches = [(X, Y)] * 3
    plain = steps(a_model(), OPTIMIZERS[kind](), batches, graph=graph)
    assert equal(
        steps(a_model(), recover.DistributedOptimizer(OPTIMIZERS[kind]()), batches, graph=graph), plain
    )


def test_passes_that_were_interrupted_are_forgotten() -> None:
    halves = [(X[:4], Y[:4]), (X[4:], Y[4:])]
    whole = steps(a_model(), keras.optimizers.SGD(0.1), [(X, Y)], graph=False)
    optimizer = recover.DistributedOptimizer(
        keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    model = a_model()
    steps(model, optimizer, halves[:1], graph=False)
    forget_sums(optimizer)
    assert close(steps(model, optimizer, halves, graph=False), whole)


def test_all_ranks_forget_passes_when_they_agree_also_the_one_whose_state_they_take() -> None:
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = a_model()
    optimizer.build(model.trainable_variables)
    state = recover.TensorFlowState(model=model, optimizer=optimizer)
    state.sync()
    steps(model, optimizer, [(X, Y)], graph=False)
    assert int(optimizer._hvdrecover.sums.count) == 1
    state.sync()
    assert int(optimizer._hvdrecover.sums.count) == 0


def test_a_saved_model_has_a_plain_optimizer(tmp_path: Path) -> None:
    model = a_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(recover.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss, jit_compile=False)
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is keras.optimizers.Adam
    mine = [variable.numpy() for variable in model.optimizer.variables]
    assert equal([variable.numpy() for variable in loaded.optimizer.variables], mine)


@pytest.mark.parametrize("what", ["twice", "no optimizer", "no passes"])
def test_what_makes_no_sense_is_refused(what: str) -> None:
    optimizer = keras.optimizers.SGD(0.1)
    with pytest.raises(ConfigError):
        if what == "twice":
            recover.DistributedOptimizer(recover.DistributedOptimizer(optimizer))
        elif what == "no optimizer":
            recover.DistributedOptimizer("sgd")
        else:
            recover.DistributedOptimizer(optimizer, backward_passes_per_step=0)


@pytest.mark.parametrize("factor", [None, 2.0])
def test_loss_scaling_around_it_is_refused(factor: float | None) -> None:
    """It would skip steps on some of the ranks only."""
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1, loss_scale_factor=factor))
    assert optimizer.loss_scale_factor == factor
    with pytest.raises(ConfigError, match=r"DistributedOptimizer\(LossScaleOptimizer"):
        keras.optimizers.LossScaleOptimizer(optimizer)
    model = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")], name="mixed")
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    with pytest.raises(ConfigError, match=r"^optimizer: .*mixed_float16"):
        model.compile(optimizer, "mse")
    model.compile(
        recover.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())), "mse"
    )


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_without_variables_need_an_optimizer_that_was_built(passes: int) -> None:
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=passes)
    with pytest.raises(ValueError, match=r"optimizer.build\(trainable_variables\)"):
        optimizer.apply([tf.constant(1.0)])
