from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.tensorflow.framework import TensorFlowFramework
from tests.contracts.adapters import DTYPES, Adapter

_DTYPES = {code: tf.as_dtype(name) for code, name in DTYPES.items()}


class TensorFlowAdapter(Adapter):
    """TensorFlow and Keras."""

    def __init__(self) -> None:
        self.framework: TensorFlowFramework = TensorFlowFramework()
        self.dtypes = list(DTYPES)

    def model(self, seed: int = 0) -> keras.Model:
        layers = [
            keras.layers.Dense(4, kernel_initializer=keras.initializers.GlorotUniform(seed), name="one"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed + 1), name="two"),
        ]
        model = keras.Sequential(layers, name="net")
        model.build((None, 3))
        return model

    def optimizer(self, model: keras.Model) -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        return optimizer

    def train_one_step(self, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.reshape(tf.linspace(-1.0, 1.0, 15), (5, 3)), training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def parameters(self, model: keras.Model) -> Mapping[str, npt.NDArray[Any]]:
        variables = model.trainable_variables
        return {f"{place} {each.name}": each.numpy().copy() for place, each in enumerate(variables)}

    def tensor(self, dtype: str, shape: tuple[int, ...], content: bytes) -> tf.Tensor:
        array = np.frombuffer(content, _DTYPES[dtype].as_numpy_dtype).reshape(shape)
        return tf.constant(array)

    def content(self, tensor: Any) -> bytes:
        array = tensor if isinstance(tensor, np.ndarray) else np.asarray(tensor.numpy())
        data: bytes = array.tobytes()
        return data

    def not_contiguous(self) -> Mapping[str, tf.Tensor]:
        return {}  # there are none

    def unsupported(self) -> Mapping[str, tf.Tensor]:
        return {
            "of texts": tf.constant(["a", "b"]),
            "of a dtype that safetensors lacks": tf.zeros(2, tf.complex128),
        }

    def draw(self) -> Mapping[str, float]:
        return {
            "python": random.random(),
            "numpy": np.random.random(),
            "tensorflow": float(tf.random.get_global_generator().uniform(())),
            "keras": float(keras.random.uniform(())),
        }


made = TensorFlowAdapter
