"""Ranks that fall out of step in a ``fit``, in one way after the other.

::

    horovodrun -np 2 python tensorflow_out_of_step.py REPORTS 'FAULT GUARD-AS-JSON' ...

A guard of ``null`` is none. Each rank writes ``REPORTS/NUMBER-RANK.json`` for each fault: what came of it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 96, 4, 2, 2
BAD_SAMPLE = 37  # in rank 1's first batch


class Shift(keras.layers.Layer):  # type: ignore[misc]
    """Adds a variable that is trained, or leaves it unused."""

    def __init__(self, *, used: bool) -> None:
        super().__init__(name="four")
        self.used = used

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(1,), name="shift")

    def call(self, inputs: Any) -> Any:
        return inputs + self.shift if self.used else inputs


def network(fault: str) -> keras.Model:
    layers = [keras.layers.Dense(16, name="one"), keras.layers.BatchNormalization(name="two")]
    layers.append(keras.layers.Dense(1, name="three"))
    if fault == "missing":
        layers.append(Shift(used=hvd.rank() != 1))
    model = keras.Sequential(layers, name="net")
    model.build((None, 8))
    return model


def samples(fault: str) -> tuple[Any, Any]:
    inputs = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype(np.float32)
    targets = inputs.sum(1, keepdims=True)
    if fault == "nan":
        inputs[BAD_SAMPLE] = np.nan
    return inputs, targets


def outcome(fault: str, guard: dict[str, Any] | None) -> dict[str, Any]:
    keras.utils.set_random_seed(1)
    model, optimizer = network(fault), recover.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, "mse", jit_compile=False)
    data = recover.elastic_dataset(samples(fault), BATCH)
    watch = None if guard is None else recover.Guard(**guard)
    state = recover.TensorFlowKerasState(model, optimizer, guard=watch, data=data, epoch=0, batch=0)
    done: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: done.append(batch))

    def train(state: recover.TensorFlowKerasState) -> None:
        callbacks = [count, *recover.fit_callbacks(state, commit_every_batches=COMMIT_EVERY)]
        model.fit(data, epochs=EPOCHS, initial_epoch=state.epoch, callbacks=callbacks, verbose=0)

    found: dict[str, Any] = {"error": None}
    try:
        recover.run(train)(state)
        found["updates"] = int(optimizer.iterations)
    except (recover.OutOfStepError, recover.NumericsError) as error:
        found |= {"error": type(error).__name__, "text": str(error)}
    found["steps"] = len(done)
    found["weights"] = [each.numpy().tobytes().hex() for each in model.trainable_variables]
    found["left_out"] = data.order.state_dict().get("left_out")
    return found


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    hvd.init()
    for number, words in enumerate(sys.argv[2:]):
        fault, guard = words.split(" ", 1)
        report = Path(sys.argv[1]) / f"{number}-{hvd.rank()}.json"
        report.write_text(json.dumps(outcome(fault, json.loads(guard))))


if __name__ == "__main__":
    main()
