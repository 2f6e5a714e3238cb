"""Batches dealt out to virtual ranks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from hvdrecover.errors import ConfigError, StepError
from hvdrecover.state.random import stream
from hvdrecover.state.rank_local import Carried, PerRank, RankLocalState
from hvdrecover.torch.elastic.sampler import ElasticSampler
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.virtual import feed

SIZE = 4


class Noisy(Dataset[Any]):
    """Sample numbers with noise."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + 0.5 * torch.rand(())


class Ranks:
    """The facts about virtual ranks that a feed asks for."""

    def __init__(self, *carried: int) -> None:
        self.carried = Carried(carried, SIZE)
        self.steps = 0

    def sample_seeds(self, step: int, rank: int) -> Callable[[str], int]:
        return stream(7, f"samples {step}", rank)

    def any_has_more(self, mine: bool) -> bool:
        return mine


def sampler_of(dataset: Any) -> ElasticSampler:
    sampler = ElasticSampler(dataset, seed=3)
    sampler.order.dealt_to = lambda: ((0,), SIZE)
    sampler.order.place(0, 1)
    return sampler


def batches(
    *carried: int, workers: int = 0, drop_last: bool = False, skip: int = 0
) -> list[dict[int, list[float]]]:
    """Go through an epoch; return each step's batches by virtual rank."""
    sampler = sampler_of(Noisy())
    sampler.order.record(2 * skip)
    loader = DataLoader(Noisy(), batch_size=2, sampler=sampler, num_workers=workers, drop_last=drop_last)
    ranks: Any = Ranks(*carried)
    ranks.steps = skip
    found = []
    for step in feed(loader, {"sampler": sampler}, TorchFramework())(ranks):
        found.append({rank: step.fetch(rank).tolist() for rank in carried})
        step.done()
        ranks.steps += 1
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_who_reads_them_does_not_matter(workers: int) -> None:
    """Not for which samples they are, and not for the noise."""
    expected = batches(0, 1, 2, 3)
    found = [
        {**one, **other} for one, other in zip(batches(0, workers=workers), batches(1, 2, 3), strict=True)
    ]
    assert found == expected
    assert batches(1, 3, skip=2) == [{rank: each[rank] for rank in (1, 3)} for each in expected[2:]]


def other_sampler(sampler: ElasticSampler) -> Any:
    return DataLoader(Noisy(), sampler=sampler_of(Noisy()))


def own_batches(sampler: ElasticSampler) -> Any:
    class RankLocalState(BatchSampler):
        pass

    loader = DataLoader(Noisy(), batch_sampler=RankLocalState(sampler, 2, drop_last=False))
    vars(loader)["sampler"] = sampler
    return loader


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda sampler: [1, 2], "a list .*ElasticSampler"),
        (lambda sampler: PerRank([1]), "a PerRank .*ElasticSampler"),
        (other_sampler, "a DataLoader .*ElasticSampler"),
        (own_batches, "batch_size=.*batch_sampler"),
    ],
)
def test_what_cannot_be_dealt_out(make: Callable[[ElasticSampler], Any], fact: str) -> None:
    sampler = sampler_of(Noisy())
    with pytest.raises(ConfigError, match=rf"^state\.steps\(\): .*{fact}"):
        feed(make(sampler), {"sampler": sampler}, TorchFramework())


def test_a_sampler_of_virtual_ranks_is_not_gone_through_without_steps() -> None:
    sampler = sampler_of(Noisy())
    with pytest.raises(StepError, match=r"^sampler: .*state\.steps\(loader\)"):
        next(iter(sampler))
    with pytest.raises(StepError, match=r"^sampler: .*record_batch\(\)"):
        sampler.record_batch(0, 2)


def test_loaders_that_know_their_place_continue_when_shares_change() -> None:
    loaders = PerRank(lambda rank, size: StatefulDataLoader(range(4), batch_size=None))
    loaders.become_virtual(SIZE, lambda: 0)
    framework, ranks = TorchFramework(), cast(Any, Ranks(1, 2))
    world = cast(Any, SimpleNamespace(size=lambda: 1))
    own = RankLocalState(framework, world, ranks, {"loaders": loaders}, "reseed")
    found = []
    for step in feed(loaders, {"loaders": loaders}, TorchFramework())(ranks):
        found.append(int(step.fetch(1)))
        break
    own.gather()
    own.move(Carried((1,), SIZE))
    ranks.carried = Carried((1,), SIZE)
    steps = feed(loaders, {"loaders": loaders}, TorchFramework())(ranks)
    assert found + [int(step.fetch(1)) for step in steps] == [0, 1, 2, 3]


def test_a_step_is_not_counted_in_the_next_epoch() -> None:
    sampler = sampler_of(Noisy())
    ranks: Any = Ranks(0)
    loader = DataLoader(Noisy(), batch_size=2, sampler=sampler)
    step = next(feed(loader, {"sampler": sampler}, TorchFramework())(ranks))
    sampler.set_epoch(1)
    step.done()
    assert sampler.processed_num == 0
