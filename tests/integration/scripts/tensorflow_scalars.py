"""Training that is to be looked at: of the last rank, the data are slow.

::

    horovodrun -np 2 python tensorflow_scalars.py fit|loop FOLDER [STOP-AFTER-STEP]

Writes TensorBoard's runs to ``FOLDER/logs``, and each rank's losses by step to ``FOLDER/losses-RANK.json``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from joint_end import end_when_all_have_written

import hvdrecover.tensorflow as recover

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 96, 4, 3, 4
SLOWNESS = 0.3  # seconds for a batch; two are read at once


class Net(keras.Sequential):
    """Computes the loss of a batch, and has it noted."""

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        loss = tf.reduce_mean((y_pred - y) ** 2)
        tf.py_function(lambda value: self.losses_seen.append(float(value)), [loss], [])
        return loss


class Script:
    """The training script.

    Args:
        folder: where to write.
        stop: after which step to stop; 0 for none.
    """

    def __init__(self, folder: Path, stop: int) -> None:
        self.losses = folder / f"losses-{hvd.rank()}.json"
        self.told = json.loads(self.losses.read_text()) if self.losses.exists() else {}
        self.stop = stop
        inputs = np.random.default_rng(0).normal(size=(SAMPLES, 8)).astype(np.float32)
        slow = hvd.rank() == hvd.size() - 1
        self.data = recover.elastic_dataset(
            (inputs, inputs.sum(1, keepdims=True)), BATCH, transform=self.slowly if slow else None
        )
        self.model = Net([keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
        self.model.losses_seen = []
        self.model.build((None, 8))
        self.model.compile(recover.DistributedOptimizer(keras.optimizers.Adam()), "mse")
        self.state = recover.TensorFlowKerasState(
            self.model,
            data=self.data,
            epoch=0,
            batch=0,
            step=0,
            checkpoint=str(folder / "commits"),
            tensorboard=str(folder / "logs"),
        )

    @staticmethod
    def slowly(*batch: tf.Tensor) -> tuple[tf.Tensor, ...]:
        waited = tf.py_function(lambda: time.sleep(SLOWNESS) or 0.0, [], tf.float32)
        waited.set_shape(())
        return batch[0] + waited, batch[1]

    def stepped(self, loss: float) -> None:
        self.state.step += 1
        self.told[str(self.state.step)] = loss
        self.losses.write_text(json.dumps(self.told))

    def may_stop(self) -> None:
        if self.state.step == self.stop:
            self.state.flush()
            sys.exit("stopped")

    def fit(self, state: recover.TensorFlowKerasState) -> None:
        seen = self.model.losses_seen
        before = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self.stepped(seen[-1]))
        after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: self.may_stop())
        steps = recover.fit_callbacks(state, commit_every_batches=COMMIT_EVERY)
        callbacks = [before, *steps, after]
        self.model.fit(
            self.data, epochs=EPOCHS, initial_epoch=state.epoch, callbacks=callbacks, shuffle=False, verbose=0
        )

    def loop(self, state: recover.TensorFlowKerasState) -> None:
        variables = self.model.trainable_variables

        @tf.function(jit_compile=False)  # type: ignore[untyped-decorator]
        def step(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.model(inputs, training=True) - targets) ** 2)
            self.model.optimizer.apply(tape.gradient(loss, variables), variables)
            return loss

        while state.epoch < EPOCHS:
            self.data.set_epoch(state.epoch)
            for inputs, targets in self.data:
                loss = step(inputs, targets)
                self.data.record_batch()
                self.stepped(float(loss))
                state.log_metrics(loss=loss, rate=0.001)
                state.batch += 1
                if state.batch % COMMIT_EVERY == 0:
                    state.commit()
                self.may_stop()
            state.epoch, state.batch = state.epoch + 1, 0


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    hvd.init()
    folder, stop = Path(sys.argv[2]), int((*sys.argv[3:], "0")[0])
    if stop:
        end_when_all_have_written(folder, hvd.rank(), hvd.size())
    script = Script(folder, stop)
    recover.run(script.fit if sys.argv[1] == "fit" else script.loop)(script.state)


if __name__ == "__main__":
    main()
