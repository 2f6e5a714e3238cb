"""Training with TensorFlow, without an end, that survives a lost worker by hvdrecover."""

from __future__ import annotations

import os

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvdrecover.tensorflow as recover
from benchmarks.jobs.steps import Steps
from benchmarks.jobs.training import (
    BATCH,
    CLASSES,
    COMMIT_EVERY,
    FEATURES,
    WIDTH,
    Orders,
    orders,
)


def by_hvdrecover(given: Orders) -> None:
    """By hvdrecover's state and loop."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    hvd.init()
    model, optimizer, steps = _network(), keras.optimizers.Adam(), Steps(given.steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    images = tf.random.stateless_uniform((BATCH, FEATURES), (hvd.rank(), 1))
    labels = tf.random.stateless_uniform((BATCH,), (hvd.rank(), 2), 0, CLASSES, tf.int64)
    state = recover.TensorFlowKerasState(
        model,
        optimizer,
        step=0,
        checkpoint=None if given.checkpoint is None else os.fspath(given.checkpoint),
    )

    @tf.function
    def step() -> None:
        with recover.DistributedGradientTape(tf.GradientTape()) as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    @recover.run
    def train(state: recover.TensorFlowKerasState) -> None:
        while True:
            step()
            recover.heartbeat()  # a loop with neither our optimizer nor our data set shows no steps by itself
            state.step += 1
            steps.done(hvd.rank(), state.step)
            if state.step % COMMIT_EVERY == 0:
                state.commit()

    train(state)


def _network() -> keras.Sequential:
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    model = keras.Sequential([*layers, keras.layers.Dense(CLASSES)])
    model.build((None, FEATURES))
    return model


if __name__ == "__main__":
    by_hvdrecover(orders(("hvdrecover",)))
