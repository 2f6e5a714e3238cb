"""Data sets of one process that stands for several ranks, one after the other."""

from __future__ import annotations

from collections import Counter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError

LENGTH = 23


def arrays(length: int = LENGTH) -> Any:
    numbers = np.arange(length)
    return {"x": numbers * 10.0, "it": numbers}


def of_arrays(**options: Any) -> recover.ElasticDataset:
    return recover.elastic_dataset(arrays(), 4, **options)


def seen(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        assert batch["x"].numpy().tolist() == [10.0 * number for number in batch["it"].numpy()]
        found += batch["it"].numpy().tolist()
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_the_ranks_together_see_each_sample_once_but_for_padding(size: int) -> None:
    every: list[int] = []
    counts = set()
    for rank in range(size):
        data = of_arrays()
        data.order.place(rank, size)
        mine = seen(data)
        counts.add(len(mine))
        every += mine
    assert len(counts) == 1
    assert set(every) == set(range(LENGTH))
    assert len(every) - LENGTH < size
    assert max(Counter(every).values()) <= 2 + size // LENGTH


@pytest.mark.parametrize(("done", "before", "after"), [(0, 1, 1), (1, 2, 3), (3, 3, 1)])
def test_what_is_left_is_dealt_out_anew_and_prefetched_batches_do_not_count(
    done: int, before: int, after: int
) -> None:
    first: list[int] = []
    cursor: dict[str, Any] = {}
    for rank in range(before):
        data = of_arrays()
        data.order.place(rank, before)
        iterator = iter(data)
        for _ in range(done):
            batch = next(iterator, None)
            first += [] if batch is None else batch["it"].numpy().tolist()
            data.record_batch()
        next(iterator, None)  # fetched, never trained on
        cursor = data.order.state_dict()
    then: list[int] = []
    for rank in range(after):
        data = of_arrays()
        data.order.load_state_dict(cursor)
        data.order.place(rank, after)
        then += seen(data)
    assert set(first) | set(then) == set(range(LENGTH))
    assert not set(first) & set(then[: LENGTH - len(first)]) or len(then) + len(first) - LENGTH < after


def test_one_data_set_is_gone_through_again_and_again() -> None:
    data = of_arrays()
    for epoch in range(3):
        data.set_epoch(epoch)
        mine = []
        for batch in data:
            mine += batch["it"].numpy().tolist()
            data.record_batch()
        assert sorted(mine) == list(range(LENGTH))
        assert seen(data) != []  # the epoch over again, as it was gone through


def test_no_thread_tunes_it_whose_end_an_iterators_end_would_wait_for() -> None:
    for data in (of_arrays(), of_arrays(transform=lambda batch: batch)):
        assert data.options().autotune.enabled is False


def test_it_can_be_used_inside_a_function_and_transformed_further() -> None:
    data = of_arrays(shuffle=False)

    @tf.function
    def total() -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for batch in data:
            found += tf.reduce_sum(batch["it"])
        return found

    assert int(total()) == sum(range(LENGTH))
    assert [int(tf.reduce_sum(batch)) for batch in data.map(lambda each: each["it"]).take(2)] == [6, 22]


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Makes its batches itself, the last one smaller."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.zeros((2 - index, 3)), np.zeros(2 - index)


@pytest.mark.parametrize(
    ("data", "options", "fact"),
    [
        ((np.zeros(3), np.zeros(4)), {}, r"length.*\[3, 4\]"),
        (tf.data.Dataset.range(3), {}, "got a .*Dataset.*PerRank"),
        (np.zeros(3), {"tail": "cut"}, "'cut'"),
        (np.float32(1), {}, "got a float32"),
        (Batches(), {}, "got a Batches.*transform="),
        (iter([np.zeros(3)]), {}, "got a list_iterator"),
        ((), {}, r"length.*\[\]"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(data: Any, options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        recover.elastic_dataset(data, 2, **options)
