r"""Train a small network on scikit-learn's handwritten digits, so that nothing can stop it.

::

    horovodrun -np 2 --min-np 1 --host-discovery-script 'discover-hosts file hosts' \
        python -m hvdrecover.examples.tensorflow_digits --checkpoint file:///data/digits

Kill any of it and start it again: it resumes where it was.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from hvdrecover import config

config.quiet_tensorflow()

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import hvdrecover.tensorflow as recover  # noqa: E402
from hvdrecover.examples.digits import Digits, digits, options  # noqa: E402
from hvdrecover.examples.ledger import Ledger  # noqa: E402

Step = Callable[[tf.Tensor, tf.Tensor], None]
"""Trains on images and labels."""
Gradients = Callable[[tf.Tensor, tf.Tensor], list[tf.Tensor]]
"""Returns gradients by images and labels."""


class Network(keras.Sequential):  # type: ignore[misc]
    """Two hidden layers with dropout; float32 ``[N, 64]`` to float32 ``[N, 10]``.

    Attributes:
        ledger: where to write down what ``fit`` trains on.
    """

    ledger: Ledger | None = None
    epoch = 0

    def train_step(self, data: Any) -> Any:
        """One step of ``fit``; the samples' numbers come along with them."""
        images, labels, indices = data
        # Before the step: a worker that is killed after it may be part of a commit of the others.
        tf.numpy_function(self._write_down, [indices], [])
        return super().train_step((images, labels))

    def _write_down(self, indices: Any) -> None:
        if self.ledger is not None:
            self.ledger.batch(hvd.rank(), hvd.size(), indices.tolist())


def network() -> Network:
    """A fresh network."""
    layers = keras.layers
    made = Network(
        [
            layers.Dense(128, activation="relu", name="hidden_1"),
            layers.Dropout(0.2),
            layers.Dense(64, activation="relu", name="hidden_2"),
            layers.Dropout(0.2),
            layers.Dense(10, name="logits"),
        ],
        name="network",
    )
    made.build((None, 64))
    return made


def optimizer_for(name: str) -> keras.optimizers.Optimizer:
    """Adam, or SGD with momentum."""
    if name == "adam":
        return keras.optimizers.Adam(2e-3)
    return keras.optimizers.SGD(0.05, momentum=0.9)


def main(arguments: list[str] | None = None) -> None:
    """Train to the end, from wherever the checkpoint root says."""
    chosen = options("tensorflow", __doc__, arguments)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    hvd.init()
    samples, test = digits()
    model = network()
    optimizer = optimizer_for(chosen.optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if chosen.fit:
        model.compile(recover.DistributedOptimizer(optimizer), loss)
    data = recover.elastic_dataset(tuple(samples), chosen.batch_size, shuffle=True, seed=0)
    state = recover.TensorFlowKerasState(
        model,
        optimizer,
        data=data,
        epoch=0,
        batch=0,
        checkpoint=chosen.checkpoint,
        virtual_ranks=chosen.virtual_ranks,
    )
    ledger = Ledger(chosen.ledger, state)
    model.ledger = ledger
    if chosen.virtual_ranks is not None and not chosen.fit:
        recover.run(by_virtual_ranks)(state, ledger, gradients_of(model, loss), chosen)
    else:
        train = by_fit if chosen.fit else by_steps
        recover.run(train)(state, ledger, step_of(model, optimizer, loss), chosen)
    if hvd.rank() == 0:
        right = accuracy(model, test)
        print(f"test accuracy {right:.4f} after {state.epoch} epochs", flush=True)
        if chosen.save:
            variables = [*model.trainable_variables, *optimizer.variables]
            arrays = {f"{place} {each.path}": each.numpy() for place, each in enumerate(variables)}
            np.savez(chosen.save, accuracy=right, **arrays)


def step_of(model: keras.Model, optimizer: keras.optimizers.Optimizer, loss: keras.losses.Loss) -> Step:
    """A step of a loop of our own.

    It is made once, before training: a process that survives a fault need not trace it again.
    """

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with recover.DistributedGradientTape(tf.GradientTape()) as tape:
            value = loss(labels, model(images, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

    made: Step = step
    return made


def by_steps(
    state: recover.TensorFlowKerasState, ledger: Ledger, step: Step, chosen: argparse.Namespace
) -> None:
    """Train in a loop of our own."""
    while state.epoch < chosen.epochs:
        state.data.set_epoch(state.epoch)
        for images, labels, indices in state.data:
            ledger.batch(hvd.rank(), hvd.size(), indices.numpy().tolist())
            step(images, labels)
            state.data.record_batch()
            state.batch += 1
            if state.batch % chosen.commit_every == 0:
                state.commit()
            time.sleep(chosen.step_seconds)
        state.epoch += 1
        state.batch = 0


def gradients_of(model: keras.Model, loss: keras.losses.Loss) -> Gradients:
    """The gradients of one virtual rank's batch; made once, as a step is."""

    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def gradients(images: tf.Tensor, labels: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        found: list[tf.Tensor] = tape.gradient(value, model.trainable_variables)
        return found

    made: Gradients = gradients
    return made


def by_virtual_ranks(
    state: recover.TensorFlowKerasState, ledger: Ledger, gradients: Gradients, chosen: argparse.Namespace
) -> None:
    """Train in a loop of our own, with one result on any number of workers."""
    while state.epoch < chosen.epochs:
        state.data.set_epoch(state.epoch)
        for step in state.steps(state.data):
            for images, labels, indices in step:
                ledger.batch(recover.virtual_rank(), recover.virtual_size(), indices.numpy().tolist())
                step.add(gradients(images, labels))
            state.optimizer.apply(step.gradients(), state.model.trainable_variables)
            state.batch += 1
            if state.batch % chosen.commit_every == 0:
                state.commit()
            time.sleep(chosen.step_seconds)
        state.epoch += 1
        state.batch = 0


def by_fit(
    state: recover.TensorFlowKerasState, ledger: Ledger, step: Step, chosen: argparse.Namespace
) -> None:
    """Train by ``model.fit``."""
    slower = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(chosen.step_seconds)
    )
    state.model.fit(
        state.data,
        epochs=chosen.epochs,
        initial_epoch=state.epoch,
        callbacks=[*recover.fit_callbacks(state, commit_every_batches=chosen.commit_every), slower],
        shuffle=False,  # the data set sees to that, and Keras would warn that it can't
        verbose=0,
    )


def accuracy(model: keras.Model, samples: Digits) -> float:
    """The part of the images that the model names right."""
    named = np.asarray(model(samples.images, training=False)).argmax(axis=1)
    return float((named == samples.labels).mean())


if __name__ == "__main__":
    main()
