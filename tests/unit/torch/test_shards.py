from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError, ShardsError

DATA = TensorDataset(torch.arange(10))


def test_a_loader_whose_samples_all_come_is_let_pass() -> None:
    recover.check_shards(DataLoader(DATA, batch_size=3, shuffle=True))
    recover.check_shards(DataLoader(DATA, batch_size=4, sampler=recover.ElasticSampler(DATA)))


def test_what_a_loader_drops_is_not_missed() -> None:
    recover.check_shards(DataLoader(DATA, batch_size=4, drop_last=True))
    recover.check_shards(DataLoader(DATA, batch_size=None))


def test_batches_of_the_users_own_are_looked_into() -> None:
    recover.check_shards(DataLoader(DATA, batch_sampler=[list(range(5)), list(range(5, 10))]))
    with pytest.raises(ShardsError, match=r"overlap: 3 of 10 .*: 2, 3, 4"):
        recover.check_shards(DataLoader(DATA, batch_sampler=[list(range(5)), list(range(2, 10))]))


def test_a_share_without_its_other_half_is_found() -> None:
    half: DistributedSampler[int] = DistributedSampler(DATA, num_replicas=2, rank=0, shuffle=False)
    with pytest.raises(ShardsError, match=r"missing: 5 of 10 .*: 1, 3, 5, 7, 9"):
        recover.check_shards(DataLoader(DATA, batch_size=3, sampler=half))


def test_a_stream_has_no_known_batches() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self):  # type: ignore[no-untyped-def]
            return iter(range(3))

    with pytest.raises(ConfigError, match=r"^loader: "):
        recover.check_shards(DataLoader(Stream()))
