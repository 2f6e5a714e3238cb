"""``horovod.tensorflow.keras`` for Keras 3, with our recovery as ``elastic``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

import horovod.keras as _horovod_keras
import horovod.tensorflow.keras as _hvd
import keras

from hvdrecover.errors import ConfigError
from hvdrecover.stand_in import standing_in as _standing_in
from hvdrecover.tensorflow.collectives import taking_what
from hvdrecover.tensorflow.keras import callbacks, elastic
from hvdrecover.tensorflow.optimizer import distribute

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "callbacks", "elastic", "load_model"]

__getattr__, __dir__ = _standing_in(_hvd, globals())

DistributedOptimizer = taking_what(_hvd.DistributedOptimizer, distribute)
"""See `hvdrecover.tensorflow.optimizer.distribute`; it takes what Horovod's takes.

Examples:
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
"""

PartialDistributedOptimizer = taking_what(_horovod_keras.PartialDistributedOptimizer, distribute)
"""`DistributedOptimizer`, but that the gradients of ``local_layers`` are left to each rank.

Examples:
    >>> head = keras.layers.Dense(2)
    >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[head])
"""


def load_model(
    filepath: str | PathLike[str],
    custom_optimizers: Sequence[type[keras.optimizers.Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = _hvd.Compression.none,
    legacy_opts: bool = False,
) -> keras.Model:
    """Load a model as Keras does, and make its optimizer, with all that it holds, a distributed one.

    Args:
        filepath: see ``keras.models.load_model``, as for ``custom_objects``.
        custom_optimizers: classes of optimizers that Keras does not have.
        compression: see `hvdrecover.tensorflow.averaging.Reduction`.
        legacy_opts: the optimizers of Keras 2; must be False.

    Examples:
        >>> model = hvd.load_model("best.keras")  # doctest: +SKIP
    """
    if legacy_opts:
        raise ConfigError("legacy_opts", "Keras 3 has no legacy optimizers; leave it out")
    optimizers = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**optimizers, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        distribute(model.optimizer, compression=compression)
    return model
