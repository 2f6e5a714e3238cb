"""Training by Keras on data that each process shuffles by itself: a fault changes what samples are."""

import random
import time

import horovod.tensorflow as hvd
import keras
import numpy as np

import hvdrecover.tensorflow as recover

hvd.init()
order = list(range(960))
random.Random().shuffle(order)
images = np.random.default_rng(0).normal(size=(960, 8)).astype(np.float32)[order]
model = keras.Sequential([keras.layers.Dense(1)])
model.build((None, 8))
model.compile(recover.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
data = recover.elastic_dataset((images, images.sum(1)), 8)
state = recover.TensorFlowKerasState(model, data=data, epoch=0, batch=0)


@recover.run
def train(state):
    slower = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.2))
    model.fit(
        data,
        epochs=1,
        initial_epoch=state.epoch,
        callbacks=[*recover.fit_callbacks(state, commit_every_batches=2), slower],
        shuffle=False,
        verbose=0,
    )


train(state)
