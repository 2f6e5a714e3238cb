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
from tests.unit.torch.jobs import URL, commit_durably, joined
from tests.unit.torch.training import Loading, Samples, make_loader

Place = Callable[[int, int], None]
LOADINGS: list[Loading] = ["plain", "batch_sampler", "workers", "persistent_workers"]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Place:
    """Makes this process a given rank of a job of a given size, as far as samplers can see."""

    def at(rank: int, size: int) -> None:
        for module in (hvd, horovod.torch.elastic.sampler):
            monkeypatch.setattr(module, "rank", lambda: rank)
            monkeypatch.setattr(module, "size", lambda: size)

    return at


def samplers(place: Place, size: int, length: int, **options: Any) -> list[recover.ElasticSampler]:
    """A sampler of each rank."""
    made = []
    for rank in range(size):
        place(rank, size)
        made.append(recover.ElasticSampler(range(length), **options))
    return made


# -- beside Horovod's own ------------------------------------------------------------------------------

SIZES = [(10, 1), (10, 2), (11, 2), (7, 3), (12, 4), (4, 4), (5, 4)]


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


@pytest.mark.parametrize(("length", "size"), SIZES)
def test_a_partly_done_epoch_is_dealt_out_as_horovods_sampler_does(
    place: Place, length: int, size: int
) -> None:
    mine: list[int] = []
    for rank in range(size):
        place(rank, size)
        ours = recover.ElasticSampler(range(length), shuffle=False)
        horovods = horovod.torch.elastic.ElasticSampler(range(length), shuffle=False)
        for sampler in (ours, horovods):
            sampler.record_batch(0, 1)
            sampler.load_state_dict({"epoch": 0, "processed_num": sampler.processed_num})
        assert ours.remaining_indices == horovods.remaining_indices
        assert len(ours) == len(horovods)
        mine += list(ours)
    left = range(length)[size:]  # what is repeated at the end, Horovod's sampler takes from these
    assert len(mine) == len(ours) * size
    assert [mine.count(index) for index in left] == [1] * len(left)


def test_states_have_what_horovods_states_have() -> None:
    sampler = recover.ElasticSampler(range(10))
    horovods = horovod.torch.elastic.ElasticSampler(range(10))
    for each in (sampler, horovods):
        each.set_epoch(2)
        each.record_batch(0, 4)
    assert horovods.state_dict().items() <= sampler.state_dict().items()
    sampler.load_state_dict({"epoch": 5, "processed_num": 3})
    assert (sampler.epoch, sampler.processed_num) == (5, 3)


def test_another_epoch_begins_anew_and_the_running_one_continues() -> None:
    sampler = recover.ElasticSampler(range(10))
    sampler.record_batch(0, 4)
    sampler.set_epoch(0)  # Horovod's begins the epoch anew
    assert (sampler.processed_num, len(sampler.remaining_indices)) == (4, 6)
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_num, len(sampler.remaining_indices)) == (1, 0, 10)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        sampler = recover.ElasticSampler(range(50), seed=seed)
        sampler.set_epoch(epoch)
        orders.append(tuple(sampler))
        assert tuple(sampler) == orders[-1]
    assert len(set(orders)) == 4
    assert list(recover.ElasticSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("tail", "padding", "length"), [("pad", 2, 12), ("drop", 0, 8)])
def test_the_end_of_an_epoch_is_filled_up_or_left_out(
    place: Place, tail: Any, padding: int, length: int
) -> None:
    made = samplers(place, 4, 10, tail=tail)
    assert [sampler.padding for sampler in made] == [padding] * 4
    dealt = [index for sampler in made for index in sampler]
    assert len(dealt) == length
    assert len(set(dealt)) == min(length, 10)


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


@pytest.mark.parametrize("options", [{"tail": "cut"}, {"seed": 0.5}])
def test_settings_that_can_not_be_are_refused(options: Any) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        recover.ElasticSampler(range(3), **options)


# -- with data loaders ---------------------------------------------------------------------------------


def indices_of(batch: Any) -> list[int]:
    return [int(index) for index in torch.as_tensor(batch[0]).view(-1)]


@pytest.mark.parametrize(
    ("loading", "batches"),
    [("plain", [4, 4, 2]), ("batch_sampler", [4, 4, 2]), ("drop_last", [4, 4]), ("no_batches", [1] * 10)],
)
def test_batches_come_as_from_torchs_own_samplers(loading: Loading, batches: list[int]) -> None:
    sampler = recover.ElasticSampler(Samples(10), seed=3)
    loader = make_loader(sampler, 4, loading)
    assert len(loader) == len(batches)
    found = [indices_of(batch) for batch in loader]
    assert [len(batch) for batch in found] == batches
    seen = [index for batch in found for index in batch]
    assert seen == list(sampler)[: len(seen)]


@pytest.mark.parametrize("loading", LOADINGS)
def test_an_epoch_is_gone_through_once_across_restores(roots: Any, loading: Loading) -> None:
    """Batches are fetched ahead, and the cursor says which of them count."""
    sampler = recover.ElasticSampler(Samples(14), seed=3)
    loader = make_loader(sampler, 3, loading)
    state = joined(sampler=sampler, done=[])
    for stop_after in (2, 1, 99):
        for number, batch in enumerate(loader):
            if number == stop_after:
                break  # trained on, but lost with the process
            sampler.record_batch(number, len(indices_of(batch)))
            state.done += indices_of(batch)
            state.commit()
        state.done.append("lost")
        state.restore()
    assert sorted(state.done) == list(range(14))


@pytest.mark.parametrize("loading", LOADINGS)
def test_a_fresh_process_continues_where_the_last_commit_was(roots: Any, loading: Loading) -> None:
    done: list[int] = []
    for stop_after in (2, 1, 99):
        sampler = recover.ElasticSampler(Samples(14), seed=3)
        joined_state = joined(URL, sampler=sampler)
        for number, batch in enumerate(make_loader(sampler, 3, loading)):
            if number == stop_after:
                break
            sampler.record_batch(number, len(indices_of(batch)))
            done += indices_of(batch)
            commit_durably(joined_state)
    assert sorted(done) == list(range(14))


@pytest.mark.parametrize("loading", LOADINGS)
def test_one_loader_goes_through_many_epochs(loading: Loading) -> None:
    sampler = recover.ElasticSampler(Samples(7), seed=3)
    loader = make_loader(sampler, 3, loading)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        order: list[int] = []
        for number, batch in enumerate(loader):
            sampler.record_batch(number, len(indices_of(batch)))
            order += indices_of(batch)
        assert sorted(order) == list(range(7))
        orders.append(tuple(order))
    assert len(set(orders)) == 3


def test_epochs_that_nobody_names_are_gone_through_again() -> None:
    sampler = recover.ElasticSampler(Samples(7), seed=3)
    loader = make_loader(sampler, 3, "plain")
    for _ in range(3):
        count = 0
        for number, batch in enumerate(loader):
            sampler.record_batch(number, len(indices_of(batch)))
            count += len(indices_of(batch))
        assert count == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_loader_drops_at_the_end_of_an_epoch_is_not_waited_for(workers: int) -> None:
    sampler = recover.ElasticSampler(Samples(10), shuffle=False)
    loader = torch.utils.data.DataLoader(
        Samples(10), 4, sampler=sampler, drop_last=True, num_workers=workers, collate_fn=list
    )
    for _ in range(3):
        count = 0
        for number, _ in enumerate(loader):
            sampler.record_batch(number, 4)
            count += 1
        assert count == 2
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert list(sampler) == [8, 9]  # resumed right there, what is left is still left
    newcomer = recover.ElasticSampler(Samples(10), shuffle=False)
    newcomer.load_state_dict(state)
    for each in (sampler, newcomer):  # both know that it is less than a batch
        assert list(each)[-2:] == [8, 9]
        assert list(each)[:2] == [0, 1]


def test_what_is_recorded_while_iterating_changes_neither_the_iteration_nor_its_length() -> None:
    sampler = recover.ElasticSampler(range(10), shuffle=False)
    seen = []
    for index in sampler:
        seen.append(index)
        sampler.record_batch(0, 1)
        assert len(sampler) == 10
    assert seen == list(range(10))


def test_a_change_in_the_number_of_ranks_deals_out_the_rest(place: Place) -> None:
    first = samplers(place, 2, 13, seed=3)
    halves = [list(sampler) for sampler in first]
    for sampler in first:
        sampler.record_batch(0, 2)  # on both ranks
    cursor = first[0].state_dict()
    second = samplers(place, 3, 13, seed=3)
    rest = []
    for rank, sampler in enumerate(second):
        place(rank, 3)
        sampler.load_state_dict(cursor)
        assert (sampler.rank, sampler.num_replicas, len(sampler)) == (rank, 3, 3)
        rest += list(sampler)
    committed = [index for half in halves for index in half[:2]]
    assert set(committed) | set(rest) == set(range(13))
    assert not set(committed) & set(rest)


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


def test_two_samplers_keep_a_cursor_each() -> None:
    train, test = recover.ElasticSampler(range(10)), recover.ElasticSampler(range(6))
    state = joined(train=train, test=test)
    train.record_batch(0, 3)
    state.commit()
    test.record_batch(0, 2)
    train.record_batch(1, 3)
    state.restore()
    assert (train.processed_num, test.processed_num) == (3, 0)
