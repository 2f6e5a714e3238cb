"""Optimizers of one rank."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError

X = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
Y = np.arange(8) % 2


def a_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(2)])
    model.build((None, 3))
    return model


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(*pair) for pair in zip(one, other, strict=True))


def test_all_ranks_forget_passes_when_they_agree_also_the_one_whose_state_they_take() -> None:
    optimizer = recover.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    model = a_model()
    optimizer.build(model.trainable_variables)
    state = recover.TensorFlowState(model=model, optimizer=optimizer)
    state.sync()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(X))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
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
