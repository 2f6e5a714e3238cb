"""Elastic data sets, in one process that stands for several ranks one after the other; and iterators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, UnsupportedValueError

LENGTH = 23


def of_arrays(**options: Any) -> recover.ElasticDataset:
    numbers = np.arange(LENGTH)
    return recover.elastic_dataset({"x": numbers * 10.0, "it": numbers}, 4, **options)


def seen(batches: Any) -> list[int]:
    found: list[int] = []
    for batch in batches:
        assert batch["x"].numpy().tolist() == [10.0 * number for number in batch["it"].numpy()]
        found += batch["it"].numpy().tolist()
    return found


def test_the_rest_is_dealt_out_to_other_ranks_and_prefetched_batches_do_not_count() -> None:
    found: list[int] = []
    cursor: dict[str, Any] = {}
    for rank in range(2):
        data = of_arrays()
        data.order.place(rank, 2)
        iterator = iter(data)
        found += next(iterator)["it"].numpy().tolist()
        data.record_batch()
        next(iterator)  # fetched, never trained on
        cursor = data.order.state_dict()
    for rank in range(3):
        data = of_arrays()
        data.order.load_state_dict(cursor)
        data.order.place(rank, 3)
        found += seen(data)
    assert sorted(found) == list(range(LENGTH))  # 8 and then 15 samples: none is repeated


def test_it_can_be_used_inside_a_function_and_transformed_further() -> None:
    data = of_arrays(shuffle=False)

    @tf.function
    def total() -> tf.Tensor:
        found = tf.constant(0, tf.int64)
        for batch in data:
            found += tf.reduce_sum(batch["it"])
        return found

    assert int(total()) == sum(range(LENGTH))
    mapped = data.map(lambda each: each["it"])
    assert [int(tf.reduce_sum(batch)) for batch in mapped.take(2)] == [6, 22]
    assert int(mapped.prefetch(2).map(tf.identity).cardinality()) == len(data) == 6


@pytest.mark.parametrize(
    ("data", "options", "fact"),
    [
        ((np.zeros(3), np.zeros(4)), {}, r"length.*\[3, 4\]"),
        (tf.data.Dataset.range(3), {}, "got a .*Dataset.*PerRank"),
        (np.zeros(3), {"tail": "cut"}, "'cut'"),
        (np.float32(1), {}, "got a float32"),
        ("text", {}, "got a str.*transform="),
        ((), {}, r"length.*\[\]"),
    ],
)
def test_data_without_samples_to_deal_out_are_refused(data: Any, options: dict[str, Any], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        recover.elastic_dataset(data, 2, **options)


SHUFFLED = tf.data.Dataset.range(20).shuffle(8, seed=3).batch(2).prefetch(2)


def with_iterator(root: Path, dataset: tf.data.Dataset = SHUFFLED) -> recover.TensorFlowState:
    batches = recover.PerRank(iter(dataset))
    state = recover.TensorFlowState([tf.Variable(0.0)], checkpoint=str(root), batches=batches)
    state.sync()
    return state


def rest(state: recover.TensorFlowState) -> Any:
    return [batch.numpy().tolist() for batch in state.batches]


def test_an_iterator_continues_where_it_was_with_its_shuffle_buffer(tmp_path: Path) -> None:
    state = with_iterator(tmp_path)
    taken = [next(state.batches.value).numpy().tolist() for _ in range(3)]
    state.commit(durable=True)
    state.flush()
    expected = rest(state)
    assert sorted(sample for batch in [*taken, *expected] for sample in batch) == list(range(20))
    state.restore()
    assert rest(state) == expected
    state.batches.value = iter(SHUFFLED)  # another epoch
    state.restore()
    assert rest(state) == expected
    assert rest(with_iterator(tmp_path)) == expected
    with pytest.raises(recover.PerRankError) as caught:
        with_iterator(tmp_path, tf.data.Dataset.range(20).batch(2).cache())  # another pipeline
    assert caught.value.path == "PerRank"


def test_a_data_set_or_an_iterator_that_tensorflow_cannot_save_is_refused(tmp_path: Path) -> None:
    data = tf.data.Dataset.range(5).map(lambda number: tf.random.uniform(()))
    with pytest.raises(UnsupportedValueError, match=r"^PerRank: .*elastic_dataset"):
        with_iterator(tmp_path, data)
    with pytest.raises(ConfigError, match=r"^PerRank: .*iter\(dataset\)"):
        recover.PerRank(SHUFFLED)
