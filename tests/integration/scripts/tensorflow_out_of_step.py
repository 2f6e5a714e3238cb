"""Ranks that fall out of step, in one way after the other; with Keras.

::

    horovodrun -np 2 python tensorflow_out_of_step.py REPORTS 'FAULT WAY GUARD-AS-JSON' ...

``WAY`` is ``fit`` (a distributed optimizer), ``loop`` (a distributed tape, in a graph) or ``eager`` (the same
without one). A guard of ``null`` is none. Each rank writes ``REPORTS/NUMBER-RANK.json`` for each fault: what
came of it.
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
AT_STEP = 6  # right before a commit


class Shift(keras.layers.Layer):  # type: ignore[misc]
    """Adds a variable that is trained, or leaves it unused."""

    def __init__(self, *, used: bool) -> None:
        super().__init__(name="four")
        self.used = used

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(1,), name="shift")

    def call(self, inputs: Any) -> Any:
        return inputs + self.shift if self.used else inputs


class Script:
    """A training script with a fault.

    Args:
        fault: what goes wrong.
        way: how it trains.
        guard: settings of the guard; None for no guard.
    """

    def __init__(self, fault: str, way: str, guard: dict[str, Any] | None) -> None:
        self.fault, self.way = fault, way
        self.odd = hvd.rank() == 1
        keras.utils.set_random_seed(1)
        self.model = self.network()
        self.optimizer = keras.optimizers.Adam(0.02 if self.has("rate") else 0.01)
        if way == "fit":
            self.optimizer = recover.DistributedOptimizer(self.optimizer)
            self.model.compile(self.optimizer, "mse", jit_compile=False)
        self.data = recover.elastic_dataset(self.samples(), BATCH, seed=int(self.has("seed")))
        self.steps = 0
        self.state = recover.TensorFlowKerasState(
            self.model,
            self.optimizer,
            guard=None if guard is None or self.has("guard") else recover.Guard(**guard),
            data=self.data,
            epoch=0,
            batch=0,
        )
        self.train = self.fit if way == "fit" else self.loop
        self.struck = False

    def has(self, fault: str) -> bool:
        """Return whether this rank has a fault."""
        return self.odd and self.fault == fault

    def network(self) -> keras.Model:
        layers = [keras.layers.Dense(16, name="one"), keras.layers.BatchNormalization(name="two")]
        if not self.has("layer"):
            layers.append(keras.layers.Dense(1, name="three"))
        if self.fault.startswith("missing"):
            layers.append(Shift(used=not (self.has("missing"))))
        model = keras.Sequential(layers, name="net")
        model.build((None, 8))
        return model

    def samples(self) -> tuple[Any, Any]:
        inputs = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype(np.float32)
        targets = inputs.sum(1, keepdims=True)
        if self.fault == "nan":
            inputs[BAD_SAMPLE] = np.nan
        return inputs, targets

    def after_step(self) -> None:
        self.steps += 1
        if self.steps == AT_STEP and not self.struck and (self.has("flip") or self.has("poison")):
            self.struck = True
            kernel = self.model.get_layer("three").kernel
            value = kernel.numpy()
            if self.has("poison"):
                value[5, 0] = np.nan
            else:
                value.view(np.uint32)[5, 0] ^= 8
            kernel.assign(value)

    def fit(self) -> None:
        after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self.after_step())
        steps = recover.fit_callbacks(self.state, commit_every_batches=COMMIT_EVERY)
        self.model.fit(
            self.data, epochs=EPOCHS, initial_epoch=self.state.epoch, callbacks=[after, *steps], verbose=0
        )

    def loop(self) -> None:
        def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
            with recover.DistributedGradientTape(tf.GradientTape()) as tape:
                outputs = self.model(inputs, training=True)
                loss = tf.reduce_mean((outputs - targets) ** 2)
            gradients = tape.gradient(loss, self.model.trainable_variables)
            self.optimizer.apply(gradients, self.model.trainable_variables)

        step = step if self.way == "eager" else tf.function(step, jit_compile=False)
        state = self.state
        while state.epoch < EPOCHS:
            self.data.set_epoch(state.epoch)
            for inputs, targets in self.data:
                step(inputs, targets)
                self.data.record_batch()
                self.after_step()
                state.batch += 1
                if state.batch % COMMIT_EVERY == 0:
                    state.commit()
            state.epoch += 1

    def outcome(self) -> dict[str, Any]:
        """Train, and tell what came of it."""
        found: dict[str, Any] = {"error": None}
        try:
            recover.run(lambda state: self.train())(self.state)
            found["updates"] = int(self.optimizer.iterations)
        except (recover.OutOfStepError, recover.NumericsError) as error:
            found |= {"error": type(error).__name__, "text": str(error)}
        found["steps"] = self.steps
        found["weights"] = [each.numpy().tobytes().hex() for each in self.model.trainable_variables]
        found["left_out"] = self.data.order.state_dict().get("left_out")
        return found


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(1)
    hvd.init()
    reports = Path(sys.argv[1])
    for number, words in enumerate(sys.argv[2:]):
        fault, way, guard = words.split(" ", 2)
        outcome = Script(fault, way, json.loads(guard)).outcome()
        (reports / f"{number}-{hvd.rank()}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
