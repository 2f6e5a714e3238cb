"""Models and commits for tests of commits outside a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover

X = np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
Y = np.ones((5, 2), np.float32)


def network(width: int = 4, seed: int = 0) -> keras.Model:
    """A small network that is built; Keras names its layers, and numbers them anew in each."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, activation="tanh"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    model.build((None, 3))
    return model


def train_one_step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """A step that depends on the model's and the optimizer's state alone."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(X) - Y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def content(component: Any) -> list[bytes]:
    """The bits of each variable, but for the seeds of a model's layers."""
    variables = [each for each in component.variables if each.name != "seed_generator_state"]
    return [each.numpy().tobytes() for each in variables]


def write_three_commits(root: Path) -> dict[int, Any]:
    """Have a job write the commits 1, 2 and 3; gives what model and optimizer held at each."""
    model, optimizer = network(), keras.optimizers.Adam(0.1)
    data = recover.elastic_dataset(np.arange(7.0), 2, seed=3)
    state = recover.TensorFlowKerasState(model, optimizer, data=data, epoch=0, checkpoint=str(root))
    state.sync()
    found = {}
    for number in (1, 2, 3):
        train_one_step(model, optimizer)
        state.epoch = number
        state.commit(durable=True)
        state.flush()
        found[number] = content(model), content(optimizer)
    assert len(set(map(repr, found.values()))) == 3
    return found
