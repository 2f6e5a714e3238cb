"""The guard in TensorFlow: structure, parameters that are not finite, shares of the data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdrecover.errors import ConfigError
from hvdrecover.guard import structure
from hvdrecover.state.adapter import Entry
from hvdrecover.tensorflow.averaging import is_finite, sums_of
from hvdrecover.tensorflow.variables import named, without_numbers
from hvdrecover.tensorflow.world import TensorFlowWorld


def describe(component: Any) -> list[Entry]:
    """Return names, shapes and dtypes of a component's variables, and an optimizer's configuration.

    Names go without the numbers that Keras gives: these depend on earlier layers of the process.
    """
    entries = [
        Entry(
            f".{number}.{without_numbers(name)}",
            f"{variable.dtype.name}{list(variable.shape)}{', trained' if variable.trainable else ''}",
        )
        for number, (name, variable) in enumerate(named(component).items())
    ]
    if isinstance(component, keras.optimizers.Optimizer):
        entries.insert(0, Entry("", f"a {type(component).__name__}"))
        entries += [
            Entry(
                f".{name}",
                json.dumps(value, default=str, sort_keys=True),
                setting=True,
                # Other settings are attributes of the optimizer, which a commit does not hold.
                stored=name == "learning_rate" and isinstance(value, float),
            )
            for name, value in sorted(component.get_config().items())
            if name != "name"
        ]
    return entries


def not_finite(variables: Mapping[str, tf.Variable]) -> list[str]:
    """Return names of the variables that hold NaN or infinity."""
    floats = {name: each for name, each in variables.items() if each.dtype.is_floating}
    if not floats or np.isfinite(sums_of(list(floats.values())).numpy()).all():
        return []
    return [name for name, each in floats.items() if not is_finite(each)]


def check_shards(dataset: tf.data.Dataset, samples: Sequence[int] | None = None, length: int = -1) -> None:
    """Have all ranks compare their data sets before an epoch: how many batches, and which samples.

    A rank with fewer batches than the others would leave them waiting in the last allreduce.

    Args:
        dataset: this rank's batches; all ranks must call this.
        samples: the numbers of its samples in the whole data set, if known.
        length: samples of the whole data set, if known.

    Raises:
        ConfigError: it has no known number of batches.
        ShardsError: samples are missing or come more than once, or the number of batches or the length of the
            data set differ; on all ranks.

    Examples:
        >>> mine = list(range(hvd.rank(), 8, hvd.size()))
        >>> recover.check_shards(tf.data.Dataset.from_tensor_slices(mine).batch(2), mine, length=8)
    """
    batches = int(dataset.cardinality())
    if batches < 0:
        raise ConfigError(
            "dataset",
            "its number of batches is unknown or infinite; say it by "
            "dataset.apply(tf.data.experimental.assert_cardinality(n))",
        )
    numbers = None if samples is None else np.asarray(samples, dtype=np.int64)
    structure.check_shards(TensorFlowWorld(), batches, numbers, length)
