"""A TensorFlow loop whose collectives have no inputs, or nothing but constants; the argument is a folder.

In each epoch both ranks make one step with an embedding of constant positions. Then rank 0 has three batches,
and rank 1 has two, after which it joins. At the end rank 0 writes all weights.
"""

import json
import os
import signal
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import keras
import tensorflow as tf

import hvdrecover.tensorflow as hvd

EPOCHS, LENGTH = 4, 3
FOLDER = Path(sys.argv[1])

hvd.init()
positions = keras.layers.Embedding(LENGTH, 2, embeddings_initializer="zeros")
positions.build()
table, weights = positions.trainable_variables[0], tf.Variable([1.0, -1.0])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
optimizer.build([table, weights])
state = hvd.elastic.TensorFlowState([table, weights], optimizer=optimizer, epoch=0)


@tf.function
def sparse_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(positions(tf.range(LENGTH)) * x)
    optimizer.apply(tape.gradient(loss, [table]), [table])
    ones, _ = hvd.grouped_allreduce([tf.ones(2), tf.zeros(3)], name="ones", op=hvd.Sum)
    twos = hvd.allreduce(tf.fill([2], 1.0) * 2.0, name="twos", op=hvd.Sum)
    return hvd.alltoall(tf.range(2), name="constant"), ones, twos


@tf.function
def dense_step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weights * weights * x)
    optimizer.apply(tape.gradient(loss, [weights]), [weights])


def kill(epoch, rank):
    """Once."""
    struck = FOLDER / f"struck-{epoch}"
    if (state.epoch, hvd.rank()) == (epoch, rank) and not struck.exists():
        struck.touch()
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        sparse_step(tf.fill([LENGTH, 2], 1.0 + hvd.rank()))
        for batch in range(3 - hvd.rank()):
            dense_step(tf.constant(0.1 * (batch + 1)))
        kill(1, 1)  # while rank 0 waits for its gradients
        kill(2, 0)  # after a step in which rank 1 takes part because it has joined
        last = hvd.join()
        hvd.broadcast_variables([weights], root_rank=int(last))
        state.epoch += 1
        state.commit()


train(state)
if hvd.rank() == 0:
    (FOLDER / "weights").write_text(json.dumps([table.numpy().tolist(), weights.numpy().tolist()]))
