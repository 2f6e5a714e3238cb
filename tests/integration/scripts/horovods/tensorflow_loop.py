"""Of the shape of tensorflow2_mnist_elastic.py: a step that was traced without the reduction first."""

import os
import time
from pathlib import Path

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdrecover.tensorflow as hvd

STEPS, RATE, PAUSE = 96, 0.002, float(os.environ["PAUSE"])
GATE = Path(os.environ["FOLDER"], "closed")  # of one batch, as long as it is there

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())
digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target
dataset = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
dataset = dataset.repeat().shuffle(1440).batch(32)
model = keras.Sequential(
    [
        keras.layers.Dense(48, activation="relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy()
opt = keras.optimizers.Adam(RATE * hvd.size())


@tf.function
def training_step(images, labels, allreduce=True):
    with tf.GradientTape() as tape:
        loss_value = loss(labels, model(images, training=True))
    if allreduce:
        tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return loss_value


for first_images, first_labels in dataset.take(1):
    training_step(first_images, first_labels, allreduce=False)


@hvd.elastic.run
def train(state):
    hvd.broadcast_variables(model.variables, root_rank=0)
    done = state.batch
    for batch, (some_images, some_labels) in enumerate(dataset.skip(done).take(STEPS - done)):
        hvd.allreduce(training_step(some_images, some_labels))  # without a name
        state.batch = done + batch + 1
        print("progress", os.getpid(), hvd.rank(), state.batch // 24, state.batch % 24, flush=True)
        time.sleep(PAUSE)
        while state.batch == 3 * 24 + 10 and GATE.exists():
            time.sleep(PAUSE)
        state.commit()


def on_state_reset():
    opt.learning_rate.assign(RATE * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

right = tf.reduce_mean(keras.metrics.sparse_categorical_accuracy(labels[1440:], model(images[1440:])))
accuracy = float(hvd.allreduce(right, name="accuracy"))
if hvd.rank() == 0:
    print("result", accuracy, state.batch, round(float(opt.learning_rate), 4), flush=True)
