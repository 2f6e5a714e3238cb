from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError
from tests.unit.torch.jobs import Samples, joined

Place = Callable[[int, int], None]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Makes this process a given rank of a job of a given size, as far as samplers can see."""

    def at(rank: int, size: int) -> None:
        for module in (hvd, horovod.torch.elastic.sampler):
            monkeypatch.setattr(module, "rank", lambda: rank)
            monkeypatch.setattr(module, "size", lambda: size)

    return at


# -- beside Horovod's own ------------------------------------------------------------------------------

SIZES = [(10, 1), (11, 2), (7, 3), (4, 4)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("length", "size"), SIZES)
def test_an_epoch_is_dealt_out_as_horovods_sampler_does(
    place: Place, shuffle: bool, length: int, size: int
) -> None:
    mine, theirs = [], []
    for rank in range(size):
        place(rank, size)
        ours = recover.ElasticSampler(range(length), shuffle=shuffle, seed=3)
        horovods = horovod.torch.elastic.ElasticSampler(range(length), shuffle=shuffle, seed=3)
        for name in (
            "epoch",
            "rank",
            "num_replicas",
            "num_samples",
            "total_size",
            "processed_num",
            "shuffle",
            "seed",
        ):
            assert getattr(ours, name) == getattr(horovods, name), name
        assert len(ours) == len(horovods) == len(list(ours))
        assert sorted(ours.remaining_indices) == sorted(horovods.remaining_indices)
        mine += list(ours)
        theirs += list(horovods)
    assert len(mine) == len(theirs)
    for indices in (mine, theirs):
        assert set(indices) == set(range(length))
        assert max(Counter(indices).values()) <= 2
    if not shuffle:
        assert mine == theirs


# -- data sets that can't be dealt out -----------------------------------------------------------------


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


class Unknown(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize("dataset", [Endless(), Unknown(), iter([1]), object()])
def test_a_data_set_without_a_length_is_refused(dataset: Any) -> None:
    with pytest.raises(ConfigError, match=f"^dataset: .*{type(dataset).__name__} "):
        recover.ElasticSampler(dataset)


# -- with data loaders ---------------------------------------------------------------------------------


def indices_of(batch: Any) -> list[int]:
    return [int(index) for index in torch.as_tensor(batch[0]).view(-1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_making_an_iterator_anew_right_at_a_commit_does_not_move_the_streams(workers: int) -> None:
    """A data loader draws from the global generator when its iterator is made."""
    sampler = recover.ElasticSampler(Samples(8))
    loader: DataLoader[Any] = DataLoader(sampler.dataset, 2, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    state = joined(sampler=sampler)
    batches = iter(loader)
    sampler.record_batch(0, len(indices_of(next(batches))))
    state.commit()
    next(batches)
    expected = torch.rand(3)
    state.restore()
    next(iter(loader))
    assert torch.rand(3).equal(expected)
