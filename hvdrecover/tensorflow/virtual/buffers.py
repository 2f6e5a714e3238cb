"""The variables of models besides those they train, such as batch norm's statistics, of each virtual rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import keras
import numpy as np
import tensorflow as tf

from hvdrecover.elastic.virtual import buffers
from hvdrecover.tensorflow.variables import named


class Buffers(buffers.Buffers):
    """See `hvdrecover.elastic.virtual.buffers.Buffers`. Seeds are not among them: each part has its own.

    Nothing is copied: variables and what is kept of them share memory until a variable is assigned.

    Args:
        layers: models and layers by attribute name.
    """

    def __init__(self, layers: Mapping[str, keras.layers.Layer]) -> None:
        self._variables = {
            f"{attribute}.{name}": variable
            for attribute, layer in layers.items()
            for name, variable in named(layer).items()
            if not variable.trainable
        }
        super().__init__()

    def names(self) -> Iterable[str]:
        """Return the names of the variables."""
        return self._variables

    def knows(self, name: str) -> bool:
        """Return whether the models have such a variable."""
        return name in self._variables

    def read(self, name: str, memory: tf.Tensor | None = None) -> tf.Tensor:
        """Return a variable's content."""
        variable = self._variables[name]
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

    def write(self, name: str, tensor: tf.Tensor) -> None:
        """Assign to a variable."""
        tf.raw_ops.AssignVariableOp(resource=self._variables[name].handle, value=tensor)

    def bits(self, tensor: tf.Tensor) -> bytes:
        """Return the bytes of a variable's content."""
        return bytes(np.ascontiguousarray(tensor._numpy()).tobytes())
