"""Trains a Keras model in a plain loop with ``state.resume()``.

Argument: a folder for the checkpoint root and gates. At a gate, each rank prints a line and awaits a file.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover

folder = Path(sys.argv[1])
hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
samples = np.arange(96)
layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
model = keras.Sequential([keras.Input((2,)), *layers])
optimizer = keras.optimizers.Adam(0.01)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
data = recover.elastic_dataset(samples, batch_size=8)
state = recover.TensorFlowKerasState(
    model,
    optimizer,
    data=data,
    epoch=0,
    seen=recover.PerRank([]),
    checkpoint=recover.Checkpoint(str(folder / "root"), every_commits=4),
)


@tf.function
def step(batch):
    inputs = tf.stack([tf.cast(batch % 5, tf.float32), tf.cast(batch % 3, tf.float32)], axis=1)
    with recover.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = loss_of(batch % 2, model(inputs, training=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


state.resume()
print("begins", hvd.rank(), state.last_commit.commit, state.finished, flush=True)
for state.epoch in range(state.epoch, 3):
    data.set_epoch(state.epoch)
    for batch in data:
        step(batch)
        data.record_batch()
        state.seen.value = [*state.seen.value, *batch.numpy().tolist()]
        state.commit()
        time.sleep(0.05)  # for the near tier's thread, also on a busy machine
        if len(state.seen.value) == 48 * state.epoch + 24:
            print("gate", state.epoch, os.getpid(), hvd.rank(), state.last_commit.commit, flush=True)
            while not (folder / str(state.epoch)).exists():
                time.sleep(0.02)
state.finish()
seen = sorted(sample for each in hvd.allgather_object(state.seen.value) for sample in each)
if hvd.rank() == 0:
    weights = b"".join(each.tobytes() for each in model.get_weights())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    print("seen", json.dumps(seen), flush=True)
