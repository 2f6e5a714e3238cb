"""``horovod.tensorflow.sync_batch_norm`` for Keras 3."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.sync_batch_norm as _hvd
import keras
import tensorflow as tf

from hvdrecover import config
from hvdrecover.errors import ConfigError
from hvdrecover.stand_in import standing_in

__getattr__, __dir__ = standing_in(_hvd, globals())


class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """A ``keras.layers.BatchNormalization`` by the mean and the variance of all ranks' batches together.

    Keras 3 has no fused one, so ``fused`` must be False.

    Examples:
        >>> layers = [keras.Input((8,)), keras.layers.Dense(4), recover.SyncBatchNormalization()]
        >>> model = keras.Sequential(layers)
    """

    def __init__(self, fused: bool = False, **options: Any) -> None:
        if fused is not False:
            raise ConfigError("fused", "statistics of all ranks need the plain one; leave it out")
        super().__init__(**options)

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        mean, variance = super()._moments(inputs, mask)
        if hvd.size() == 1 and not config.read().elastic:
            return mean, variance
        # Var[x] = E[x²] - E[x]², and all ranks have batches of one size.
        both = tf.stack([mean, variance + tf.square(mean)])
        mean, square = tf.unstack(hvd.allreduce(both, op=hvd.Average, name=f"{self.name}_moments"))
        return mean, square - tf.square(mean)
