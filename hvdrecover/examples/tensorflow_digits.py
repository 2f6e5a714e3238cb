r"""Train a small network on scikit-learn's handwritten digits, in a job that recovers from faults.

::

    hvdrecover run -np 2 --checkpoint file:///data/digits -- python -m hvdrecover.examples.tensorflow_digits

Kill any process and start the job again: it resumes from its last commit.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.examples.digits import Digits, Ledger, digits, options


class Network(keras.Sequential):  # type: ignore[misc]
    """Two hidden layers with dropout; float32 ``[N, 64]`` to float32 ``[N, 10]``."""

    ledger: Ledger | None = None  # records the samples that ``fit`` trains on

    def train_step(self, data: Any) -> Any:
        """Train one step of ``fit`` on images, labels and the numbers of the samples."""
        images, labels, indices = data
        # Before the step: if this rank is killed after it, the others may already have committed.
        tf.numpy_function(self._record, [indices], [])
        return super().train_step((images, labels))

    def _record(self, indices: Any) -> None:
        if self.ledger is not None:
            self.ledger.batch(hvd.rank(), hvd.size(), indices.tolist())


def network() -> Network:
    layers: list[Any] = []
    for number, width in enumerate((128, 64), start=1):
        layers.append(keras.layers.Dense(width, activation="relu", name=f"hidden_{number}"))
        layers.append(keras.layers.Dropout(0.2))
    model = Network([*layers, keras.layers.Dense(10, name="logits")], name="network")
    model.build((None, 64))
    return model


def optimizer_for(name: str) -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(2e-3) if name == "adam" else keras.optimizers.SGD(0.05, momentum=0.9)


def accuracy(model: keras.Model, samples: Digits) -> float:
    named = np.asarray(model(samples.images, training=False)).argmax(axis=1)
    return float((named == samples.labels).mean())


def main(arguments: list[str] | None = None) -> None:
    """Train from the newest commit of the checkpoint root to the end."""
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
    model.ledger = Ledger(chosen.ledger, state)
    if chosen.fit:
        recover.run(fit)(state, chosen)
    else:
        train_in_loop(state, model.ledger, loss, chosen)
    if hvd.rank() == 0:
        share = accuracy(model, test)
        print(f"test accuracy {share:.4f} after {state.epoch} epochs", flush=True)
        if chosen.save:
            variables = [*model.trainable_variables, *optimizer.variables]
            arrays = {f"{place} {each.path}": each.numpy() for place, each in enumerate(variables)}
            np.savez(chosen.save, accuracy=share, **arrays)


def train_in_loop(
    state: recover.TensorFlowKerasState, ledger: Ledger, loss: keras.losses.Loss, chosen: argparse.Namespace
) -> None:
    """Train in a loop. With virtual ranks, the result is the same on any number of ranks."""
    model, optimizer, virtual = state.model, state.optimizer, chosen.virtual_ranks is not None
    rank, size = (recover.virtual_rank, recover.virtual_size) if virtual else (hvd.rank, hvd.size)

    # Made before training: a process that survives a fault need not trace it again.
    @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
    def gradients_of(images: tf.Tensor, labels: tf.Tensor) -> Any:
        plain = tf.GradientTape()
        with plain if virtual else recover.DistributedGradientTape(plain) as tape:
            value = loss(labels, model(images, training=True))
        return tape.gradient(value, model.trainable_variables)

    @recover.run
    def train(state: recover.TensorFlowKerasState) -> None:
        while state.epoch < chosen.epochs:
            state.data.set_epoch(state.epoch)
            for step in state.steps(state.data) if virtual else state.data:
                for images, labels, indices in step if virtual else [step]:
                    ledger.batch(rank(), size(), indices.numpy().tolist())
                    gradients = gradients_of(images, labels)
                    if virtual:
                        step.add(gradients)
                optimizer.apply(step.gradients() if virtual else gradients, model.trainable_variables)
                if not virtual:
                    state.data.record_batch()
                state.batch += 1
                if state.batch % chosen.commit_every == 0:
                    state.commit()
                time.sleep(chosen.step_seconds)
            state.epoch += 1
            state.batch = 0

    train(state)


def fit(state: recover.TensorFlowKerasState, chosen: argparse.Namespace) -> None:
    sleep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: time.sleep(chosen.step_seconds)
    )
    state.model.fit(
        state.data,
        epochs=chosen.epochs,
        initial_epoch=state.epoch,
        callbacks=[*recover.fit_callbacks(state, commit_every_batches=chosen.commit_every), sleep],
        shuffle=False,  # the data set shuffles; Keras would warn that it cannot
        verbose=0,
    )


if __name__ == "__main__":
    main()
