"""Checking data loaders that are not dealt out by an `ElasticSampler`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch.utils.data

from hvdrecover.elastic.guard import shards
from hvdrecover.errors import ConfigError
from hvdrecover.torch.world import TorchWorld


def check_shards(loader: torch.utils.data.DataLoader[Any]) -> None:
    """Have all ranks compare their data loaders before an epoch: the samples, and how many batches.

    A rank with fewer batches than the others would leave them waiting in the last allreduce. Its sampler is
    gone through once; one that draws from a global generator draws from it. What ``drop_last`` leaves out of
    a rank's share is not missed.

    Args:
        loader: this rank's, for this epoch; all ranks must call this.

    Raises:
        ConfigError: its data set has no length.
        ShardsError: samples are missing or come more than once, or the number of batches or the length of the
            data set differ; on all ranks.

    Examples:
        >>> data = torch.utils.data.TensorDataset(torch.arange(8))
        >>> sampler = torch.utils.data.DistributedSampler(data, hvd.size(), hvd.rank())
        >>> recover.check_shards(torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler))
    """
    try:
        batches, length = len(loader), len(loader.dataset)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            "loader", "its data set has no length, so nobody knows how many batches there will be"
        ) from error
    shards.check(TorchWorld(), batches, np.fromiter(_samples(loader), dtype=np.int64), length)


def _samples(loader: torch.utils.data.DataLoader[Any]) -> Iterator[int]:
    sampler = getattr(loader.batch_sampler, "sampler", None) if loader.batch_sampler else loader.sampler
    if sampler is not None:
        yield from sampler
    else:  # batches of the user's own making
        for batch in loader.batch_sampler or ():
            yield from batch
