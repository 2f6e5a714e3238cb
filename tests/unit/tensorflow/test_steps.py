"""Times, gradient norms and losses of TensorFlow's steps, in a job of one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework.config import disable_op_determinism

import hvdrecover.tensorflow as recover
from tests.integration.scalars import Run, read

SAMPLES, BATCH = 24, 4
X = np.linspace(-1, 1, SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3)
Y = X.sum(1, keepdims=True)


def a_state(folder: Path, **options: Any) -> recover.TensorFlowKerasState:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.build((None, 3))
    model.compile(recover.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", **options)
    data = recover.elastic_dataset((X, Y), BATCH, shuffle=False)
    state = recover.TensorFlowKerasState(model, data=data, epoch=0, batch=0, tensorboard=str(folder))
    state.sync()
    return state


def run_of(state: recover.TensorFlowState, folder: Path) -> Run:
    state.finish()
    return read(folder / "rank-0")


def expected(state: recover.TensorFlowKerasState) -> tuple[list[float], list[float]]:
    """Losses and norms of gradients of each batch; with a learning rate of 0 they don't depend on others."""
    losses, norms, model = [], [], state.model
    for start in range(0, SAMPLES, BATCH):
        with tf.GradientTape() as tape:
            batch = slice(start, start + BATCH)
            loss = tf.reduce_mean((model(X[batch], training=True) - Y[batch]) ** 2)
        losses.append(float(loss))
        norms.append(float(tf.linalg.global_norm(tape.gradient(loss, model.trainable_variables))))
    return losses, norms


def by_step(values: list[float]) -> dict[int, Any]:
    return {step: pytest.approx(value, rel=1e-4) for step, value in enumerate(values, 1)}


@pytest.fixture(params=[False, True], ids=["usual", "op determinism"])
def determinism(request: pytest.FixtureRequest) -> None:
    request.addfinalizer(disable_op_determinism)
    if request.param:
        tf.config.experimental.enable_op_determinism()


@pytest.mark.usefixtures("determinism")
@pytest.mark.parametrize("eagerly", [False, True])
def test_fit_tells_of_each_batch(tmp_path: Path, eagerly: bool) -> None:
    state = a_state(tmp_path, run_eagerly=eagerly)
    losses, norms = expected(state)
    callbacks = recover.fit_callbacks(state, commit_every_batches=2)
    state.model.fit(state.data, callbacks=callbacks, verbose=0, shuffle=False)
    run = run_of(state, tmp_path)
    means = np.cumsum(losses) / np.arange(1, len(losses) + 1)  # as Keras tells its callbacks
    assert run.scalars["loss"] == by_step(means.tolist())
    assert run.scalars["norm/averaged_gradient"] == by_step(norms)
    for name in ("seconds/step", "seconds/allreduce_wait"):
        assert run.steps[name] == [1, 2, 3, 4, 5, 6]
        assert min(run.scalars[name].values()) >= 0.0


def test_slices_of_one_place_are_added_up(tmp_path: Path) -> None:
    table = tf.Variable([[1.0], [1.0], [1.0]])
    state = recover.TensorFlowState([table], tensorboard=str(tmp_path))
    state.sync()
    with recover.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(tf.gather(table, [1, 1, 1, 2]))
    assert isinstance(tape.gradient(loss, [table])[0], tf.IndexedSlices)
    state.commit()
    assert run_of(state, tmp_path).scalars["norm/averaged_gradient"] == {1: pytest.approx(math.sqrt(10))}


def test_what_xla_compiles_leaves_no_marks(tmp_path: Path) -> None:
    weight = tf.Variable([2.0])
    state = recover.TensorFlowState([weight], tensorboard=str(tmp_path))
    state.sync()

    @tf.function(jit_compile=True)  # type: ignore[untyped-decorator]
    def gradient() -> tf.Tensor:
        with recover.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(weight**2)
        return tape.gradient(loss, [weight])[0]

    assert float(gradient()[0]) == 4.0
    state.commit()
    assert "seconds/step" not in run_of(state, tmp_path).scalars
