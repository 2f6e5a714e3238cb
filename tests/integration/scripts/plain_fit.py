"""A plain Keras script, which does not know hvdrecover; the argument is a folder.

It calls ``fit`` twice: with arrays, and with a `PyDataset`.

A line of ``FAULTS`` is a fit, how many of its batches a process has done, a signal, and which rank gets it
there: one, or ``all``. They strike one after the other, each once.
"""

import json
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import tensorflow as tf

FOLDER = Path(sys.argv[1])
FAULTS = os.environ.get("FAULTS", "").splitlines()
SAMPLES, BATCH = 36, 4  # of each rank


class Seen(keras.callbacks.Callback):
    """A user's callback: has state, leaves the samples of each batch behind, and kills."""

    def __init__(self, fit):
        super().__init__()
        self.fit, self.batches, self.rank = fit, 0, hvd.rank()
        (FOLDER / f"pid-{self.rank}").write_text(str(os.getpid()))
        self.strike(f"{fit} 0")

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.strike(f"{self.fit} {self.batches}")

    def strike(self, now):
        number = len(list(FOLDER.glob("struck-*")))
        if number >= len(FAULTS):  # a later start has none
            return
        place, name, whom = FAULTS[number].rsplit(" ", 2)
        if place != now or self.rank != (1 if whom == "all" else int(whom)):
            return
        (FOLDER / f"struck-{number}").touch()
        for rank in [0, 1] if whom == "all" else [int(whom)]:
            os.kill(int((FOLDER / f"pid-{rank}").read_text()), signal.Signals[name])


class Model(keras.Model):
    """Has its own training step, which counts how often each sample is trained on."""

    def __init__(self):
        super().__init__()
        layers = [
            keras.layers.Rescaling([0.01, 0.2, 0.3]),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
        ]
        self.net = keras.Sequential(layers)
        # A part of the model, so that a commit has the counts of that moment.
        self.counts = self.add_weight(shape=(2 * SAMPLES,), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        return self.net(inputs, training=training)

    def train_step(self, data):
        samples = tf.cast(data[0][:, 0], tf.int32)
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(samples, 2 * SAMPLES), axis=0))
        return super().train_step(data)


class Batches(keras.utils.PyDataset):
    """Shuffles its samples by the global generator."""

    def __init__(self):
        super().__init__(workers=2)
        self.order = np.arange(SAMPLES)

    def __len__(self):
        return SAMPLES // BATCH

    def __getitem__(self, index):
        part = self.order[index * BATCH : (index + 1) * BATCH]
        return inputs[part], targets[part]

    def on_epoch_end(self):
        np.random.shuffle(self.order)


tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
hvd.init()
mine = np.arange(2 * SAMPLES)[hvd.rank() :: hvd.size()]
inputs = np.stack([mine, mine % 5, mine % 3], axis=1).astype(np.float32)
targets = mine % 2
model = Model()
outcome = {}
arrays = {"x": inputs, "y": targets, "batch_size": BATCH}
for fit, epochs, data in ((1, 2, arrays), (2, 3, {"x": Batches()})):
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * hvd.size())),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    seen = Seen(fit)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[model.counts]),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.02, warmup_epochs=2, verbose=0),
        seen,
    ]
    if hvd.rank() == 0:
        name = f"fit-{fit}-{{epoch}}.weights.h5"
        callbacks.append(keras.callbacks.ModelCheckpoint(str(FOLDER / name), save_weights_only=True))
    history = model.fit(
        **data,
        class_weight={0: 1.0, 1: 2.0},
        validation_data=(inputs[:8], targets[:8]),
        epochs=epochs,
        callbacks=callbacks,
        verbose=0,
    )
    outcome[fit] = {
        "history": [history.epoch, history.history],
        "weights": [each.tobytes().hex() for each in model.get_weights()],
        "optimizer": [each.numpy().tobytes().hex() for each in model.optimizer.variables],
        "counts": model.counts.numpy()[hvd.rank() :: hvd.size()].tolist(),
    }
(FOLDER / f"outcome-{hvd.rank()}").write_text(json.dumps(outcome))
