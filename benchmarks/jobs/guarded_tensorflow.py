"""A training of TensorFlow that may have a guard: ``horovodrun -np 2 python -m … SIZE STATE FOLDER``."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import hvdrecover.tensorflow as recover
from benchmarks.jobs.guarded import compare
from benchmarks.states import Setting
from hvdrecover.examples.digits import digits
from hvdrecover.examples.tensorflow_digits import network, optimizer_for

_BATCH = 16  # samples; the digits example's default


class Training:
    """See `benchmarks.jobs.guarded.Training`; what graphs send, no clock of this thread can tell."""

    sending = 0.0

    def __init__(self, guard: recover.Guard | None) -> None:
        keras.utils.set_random_seed(1)
        model, optimizer = network(), optimizer_for("adam")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        samples, _ = digits()
        self._data = recover.elastic_dataset(tuple(samples), _BATCH, shuffle=True, seed=0)
        self._batches = self._epochs()
        self.state = recover.TensorFlowKerasState(model, optimizer, data=self._data, batch=0, guard=guard)
        self.state.sync()

        @tf.function(reduce_retracing=True)  # type: ignore[untyped-decorator]
        def step(images: tf.Tensor, labels: tf.Tensor) -> None:
            with recover.DistributedGradientTape(tf.GradientTape()) as tape:
                value = loss(labels, model(images, training=True))
            optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

        self._step = step

    def step(self) -> None:
        """Train on one batch."""
        self._step(*next(self._batches))
        self.state.batch += 1

    def _epochs(self) -> Iterator[Any]:
        for epoch in itertools.count():
            self._data.set_epoch(epoch)
            for images, labels, _ in self._data:
                yield images, labels
                self._data.record_batch()


if __name__ == "__main__":
    chosen = Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    tf.config.threading.set_intra_op_parallelism_threads(1)  # these two as the example does
    tf.config.experimental.enable_op_determinism()
    hvd.init()
    compare(chosen, Training, writes=hvd.rank() == 0)
