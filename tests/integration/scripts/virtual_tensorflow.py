"""A script of virtual ranks in TensorFlow; a process may kill itself once, in a virtual rank's part."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow is imported

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

import hvdrecover.tensorflow as recover

FOLDER = Path(os.environ["FOLDER"])  # of the reports, and of who has been killed
KILLED = os.environ.get("KILLED")  # step and virtual rank
HOSTS = os.environ.get("HOSTS")  # file to which a worker that is left alone adds a slot
OPTIMIZER = os.environ.get("OPTIMIZER", "adam")

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.experimental.enable_op_determinism()
keras.utils.set_random_seed(1)
hvd.init()
layers = keras.layers
model = keras.Sequential(
    [layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(4)]
)
model.build((None, 8))
optimizer = keras.optimizers.Adam(1e-2) if OPTIMIZER == "adam" else keras.optimizers.SGD(0.05, momentum=0.9)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
numbers = np.random.default_rng(0)
samples = numbers.normal(size=(103, 8)).astype(np.float32), numbers.integers(0, 4, 103)


def noisy(images, labels, *, seed):
    return images + 0.1 * tf.random.stateless_normal(tf.shape(images), seed), labels


data = recover.elastic_dataset(samples, 4, seed=0, transform=noisy)
state = recover.TensorFlowKerasState(
    model, optimizer, data=data, epoch=0, step=0, sizes=[], losses=recover.PerRank([]), virtual_ranks=4
)


@tf.function(reduce_retracing=True)
def gradients_of(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    return loss, tape.gradient(loss, model.trainable_variables)


def fall():
    """Die, if it is this one's turn and it has not done so before."""
    mark = FOLDER / "killed"
    if f"{state.step} {recover.virtual_rank()}" == KILLED and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_another(state):
    """Once left alone, ask for another worker, and continue with it."""
    if HOSTS is not None and hvd.size() == 1 and state.step >= 9:
        Path(HOSTS).write_text("localhost:2\n127.0.0.1:2\n")
        while True:
            state.commit()  # until hosts have come
            time.sleep(0.02)


@recover.run
def train(state):
    while state.epoch < 3:
        data.set_epoch(state.epoch)
        for step in state.steps(data):
            if state.step % 2 == 0:  # at a commit, batch norm changes its statistics
                model(samples[0][:16], training=True)
            for images, labels in step:
                fall()
                loss, gradients = gradients_of(images, labels)
                step.add(gradients)
                state.losses.value.append(float(loss))
            optimizer.apply_gradients(zip(step.gradients(), model.trainable_variables, strict=True))
            state.step += 1
            state.sizes.append(hvd.size())
            if state.step % 2 == 0:
                state.commit()
            wait_for_another(state)
        state.epoch += 1


train(state)
state.commit()


def digest(variables):
    named = [each for each in variables if each.name != "seed_generator_state"]
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in named)).hexdigest()


report = {
    "weights": digest(model.trainable_variables),
    "statistics": digest(model.non_trainable_variables),
    "optimizer": digest(optimizer.variables),
}
losses = {rank: found for rank in range(4) if (found := state.losses.of(rank))}  # of those of this process
(FOLDER / f"report-{hvd.rank()}").write_text(json.dumps([report, losses]))
(FOLDER / "sizes").write_text(json.dumps(state.sizes))
