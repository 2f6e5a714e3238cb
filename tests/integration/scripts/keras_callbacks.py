"""Keras's callbacks in a ``fit`` of two ranks to which something happens; the argument is a folder.

``FAULTS`` has a line for each fault, which strikes once: epoch, batch or ``end``, and whom it kills: ``0`` or
``1``, ``all``, or ``job``, for which the rank waits to be killed by somebody else.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover

SAMPLES, BATCH, EPOCHS = 48, 4, 9  # six batches an epoch
SCORES = [5.0, 4.0, 6.0, 6.0, 3.0, 7.0, 7.0, 7.0, 1.0]  # of each epoch: what is judged by
FOLDER = Path(sys.argv[1])


class Faults(keras.callbacks.Callback):
    """Behind the callbacks that are tested."""

    def __init__(self, state):
        super().__init__()
        self.state = state
        self.lines = os.environ.get("FAULTS", "").splitlines()
        (FOLDER / f"pid-{hvd.rank()}").write_text(str(os.getpid()))

    def on_train_batch_end(self, batch, logs=None):
        self.strike(f"{self.state.epoch} {self.state.batch}")

    def on_epoch_end(self, epoch, logs=None):
        self.strike(f"{epoch} end")

    def strike(self, now):
        for line in self.lines:
            place, _, whom = line.rpartition(" ")
            struck = FOLDER / line.replace(" ", "-")
            if place == now and str(hvd.rank()) == (whom if whom in "01" else "0") and not struck.exists():
                struck.touch()
                if whom == "job":
                    time.sleep(3600)
                ranks = [1, 0] if whom == "all" else [int(whom)]
                for rank in ranks:
                    os.kill(int((FOLDER / f"pid-{rank}").read_text()), signal.SIGKILL)


class Traced(keras.Sequential):
    """Its training step leaves a line whenever TensorFlow traces it."""

    def train_step(self, data):
        with (FOLDER / "traces").open("a") as file:
            print(os.getpid(), file=file)
        return super().train_step(data)


def callbacks(state):
    found = [
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(score=SCORES[epoch])),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.ReduceLROnPlateau("score", factor=0.5, patience=2, cooldown=1, mode="min"),
        keras.callbacks.EarlyStopping("score", patience=3, mode="min", restore_best_weights=True),
    ]
    if hvd.rank() == 0:
        best = str(FOLDER / "best.weights.h5")
        found += [
            keras.callbacks.ModelCheckpoint(
                best, "score", save_best_only=True, save_weights_only=True, mode="min"
            ),
            keras.callbacks.CSVLogger(str(FOLDER / "log.csv")),
        ]
    return [*found, *recover.fit_callbacks(state, commit_every_batches=2), Faults(state)]


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
hvd.init()
inputs = np.linspace(-1, 1, SAMPLES * 3, dtype=np.float32).reshape(SAMPLES, 3)
targets = np.arange(SAMPLES) % 2
layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
model = Traced(layers)
model.build((None, 3))
model.compile(
    recover.DistributedOptimizer(keras.optimizers.Adam(0.01)),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
data = recover.elastic_dataset((inputs, targets), BATCH)
state = recover.TensorFlowKerasState(model, data=data, epoch=0, batch=0, checkpoint=str(FOLDER / "commits"))


@recover.run
def train(state):
    return state.model.fit(
        state.data,
        validation_data=(inputs, targets),
        epochs=EPOCHS,
        initial_epoch=state.epoch,
        shuffle=False,
        callbacks=callbacks(state),
        verbose=0,
    )


history = train(state)
variables = [*model.weights, *state.optimizer.variables]
outcome = {
    "epoch": state.epoch,
    "history": [history.epoch, history.history],
    "variables": [each.numpy().tobytes().hex() for each in variables],
}
(FOLDER / f"outcome-{hvd.rank()}").write_text(json.dumps(outcome))
