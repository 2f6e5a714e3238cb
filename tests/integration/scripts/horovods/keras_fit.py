"""Of the shape of Horovod's tensorflow2_keras_mnist_elastic.py: ``model.fit`` with the three callbacks."""

import os
import time
from pathlib import Path

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdrecover.tensorflow.keras as hvd

EPOCHS, STEPS, RATE, PAUSE = 4, 24, 0.002, float(os.environ["PAUSE"])
GATE = Path(os.environ["FOLDER"], "closed")  # of one batch, as long as it is there


class Progress(keras.callbacks.Callback):
    def on_batch_end(self, batch, logs=None):
        print("progress", os.getpid(), hvd.rank(), state.epoch, state.batch, flush=True)
        time.sleep(PAUSE)
        while (state.epoch, state.batch) == (3, 10) and GATE.exists():
            time.sleep(PAUSE)


hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())
digits = load_digits()
images, labels = digits.data.astype("float32") / 16, digits.target
dataset = tf.data.Dataset.from_tensor_slices((images[:1440], labels[:1440]))
dataset = dataset.repeat().shuffle(1440).batch(32)
model = keras.Sequential(
    [
        keras.layers.Input((64,)),
        keras.layers.Dense(48, activation="relu"),
        keras.layers.Dropout(0.1),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
opt = hvd.DistributedOptimizer(
    keras.optimizers.Adam(RATE * hvd.size()),
    backward_passes_per_step=1,
    average_aggregated_gradients=True,
    compression=hvd.Compression.fp16,
)
model.compile(optimizer=opt, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    state.model.optimizer.learning_rate.assign(RATE * hvd.size())
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


state.register_reset_callbacks([on_state_reset])
callbacks = [
    hvd.elastic.CommitStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.callbacks.MetricAverageCallback(),
    Progress(),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(os.environ["FOLDER"] + "/checkpoint-{epoch}.keras"))


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset, steps_per_epoch=STEPS, epochs=EPOCHS - state.epoch, callbacks=callbacks, verbose=0
    )


train(state)
_, right = model.evaluate(images[1440:], labels[1440:], verbose=0)
accuracy = float(hvd.allreduce(right, name="accuracy"))
if hvd.rank() == 0:
    rate = float(opt.learning_rate)
    print("result", accuracy, state.epoch, state.batch, round(rate, 4), flush=True)
