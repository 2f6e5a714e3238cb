"""Checking data sets that are not dealt out by `elastic_dataset`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from hvdrecover.elastic.guard import shards
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.world import TensorFlowWorld


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
    shards.check(TensorFlowWorld(), batches, numbers, length)
