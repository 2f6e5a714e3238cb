"""The cases in which Horovod's elastic TensorFlow API fails.

``python tensorflow_failures.py CASE [OPTION]`` prints a line ``report {…}`` per rank.
"""

import hashlib
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

from hvdrecover.tensorflow import DistributedGradientTape, TensorFlowKerasState, TensorFlowState, run

STEPS, FATAL = 10, 4


def report(**facts):
    print("report", json.dumps({"rank": hvd.rank(), **facts}), flush=True)


def lost(collective, folder):
    """Rank 1 is killed while the others are in a collective inside a ``tf.function``."""
    marker = Path(folder, "killed")
    traces = []

    @tf.function
    def step(value):
        traces.append(value)
        values = tf.stack([value, value])
        if collective == "grouped_allreduce":
            return hvd.grouped_allreduce([values], op=hvd.Sum)[0]
        if collective == "alltoall":
            return hvd.alltoall(tf.repeat(values, 6), name="mine")[0]
        return hvd.reducescatter(tf.repeat(values, 6), name="mine", op=hvd.Sum)

    def train(state):
        while state.batch < STEPS:
            if hvd.rank() == 1 and state.batch == FATAL and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step(tf.constant(1.0))
            state.batch += 1
            state.commit()
        return "trained"

    state = TensorFlowState(variables=[tf.Variable(1.0)], batch=0)
    result = run(train)(state)
    report(result=result, batch=state.batch, traces=len(traces))


def join(folder):
    """Ranks that join late have all that the others have."""
    keras.utils.set_random_seed(os.getpid())
    layers = [keras.layers.Dense(8, name="one"), keras.layers.Dropout(0.5), keras.layers.Dense(2, name="two")]
    model = keras.Sequential(layers, name="net")
    model.build((None, 3))
    optimizer = keras.optimizers.Adam(0.01)
    import hvdrecover.tensorflow as recover

    data = recover.elastic_dataset((np.ones((50_000, 3), np.float32),), 4)
    state = TensorFlowKerasState(model, optimizer, data=data, batch=0, epoch=0)

    @tf.function(reduce_retracing=True)
    def step(x):
        with DistributedGradientTape(tf.GradientTape()) as recording:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(recording.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train(state):
        together = 0
        for (x,) in state.data:
            together += hvd.size() == 2
            if together == 1:
                report(
                    content=digest([*model.variables, *optimizer.variables]),
                    batch=state.batch,
                    cursor=state.data.order.state_dict(),
                    run_seed=state._session.own.seed,
                    seeds_differ=digest([each for each in model.variables if "seed" in each.path]),
                )
            step(x)
            state.data.record_batch()
            state.batch += 1
            state.commit()
            Path(folder, "trained").touch()
            if together == 3:
                report(after=digest([*model.trainable_variables, *optimizer.variables]))
                return
            time.sleep(0.05)

    run(train)(state)


def digest(variables):
    content = b"".join(each.numpy().tobytes() for each in variables if "seed" not in each.path)
    if not content:
        content = b"".join(each.numpy().tobytes() for each in variables)
    return hashlib.sha256(content).hexdigest()


hvd.init()
globals()[sys.argv[1]](*sys.argv[2:])
