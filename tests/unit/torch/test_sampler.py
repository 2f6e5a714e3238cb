from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic
import pytest
from torch.utils.data import IterableDataset

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError

Place = Callable[[int, int], None]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Makes this process a given rank of a job of a given size, as far as samplers can see."""

    def at(rank: int, size: int) -> None:
        for module in (hvd, horovod.torch.elastic.sampler):
            monkeypatch.setattr(module, "rank", lambda: rank)
            monkeypatch.setattr(module, "size", lambda: size)

    return at


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("length", "size"), [(10, 1), (11, 2), (7, 3), (4, 4)])
def test_an_epoch_is_dealt_out_as_horovods_sampler_does(
    place: Place, shuffle: bool, length: int, size: int
) -> None:
    names = "epoch rank num_replicas num_samples total_size processed_num shuffle seed"
    mine, theirs = [], []
    for rank in range(size):
        place(rank, size)
        ours = recover.ElasticSampler(range(length), shuffle=shuffle, seed=3)
        horovods = horovod.torch.elastic.ElasticSampler(range(length), shuffle=shuffle, seed=3)
        for name in names.split():
            assert getattr(ours, name) == getattr(horovods, name), name
        assert len(ours) == len(horovods) == len(list(ours))
        assert sorted(ours.remaining_indices) == sorted(horovods.remaining_indices)
        mine += list(ours)
        theirs += list(horovods)
    assert len(mine) == len(theirs)
    for indices in (mine, theirs):
        assert set(indices) == set(range(length))
        assert max(Counter(indices).values()) <= 2
    assert shuffle or mine == theirs


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Endless(), iter([1]), object()])
def test_a_data_set_without_a_length_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigError, match=f"^dataset: .*{type(dataset).__name__} "):
        recover.ElasticSampler(dataset)
