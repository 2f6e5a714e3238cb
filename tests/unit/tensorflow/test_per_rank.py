"""Iterators of ``tf.data``, as each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, UnsupportedValueError

SHUFFLED = tf.data.Dataset.range(20).shuffle(8, seed=3).batch(2).prefetch(2)


def make(root: Path, dataset: tf.data.Dataset = SHUFFLED) -> recover.TensorFlowState:
    batches = recover.PerRank(iter(dataset))
    state = recover.TensorFlowState([tf.Variable(0.0)], checkpoint=str(root), batches=batches)
    state.sync()
    return state


def rest(state: recover.TensorFlowState) -> Any:
    return [batch.numpy().tolist() for batch in state.batches]


def test_an_iterator_continues_where_it_was_with_its_shuffle_buffer(tmp_path: Path) -> None:
    state = make(tmp_path)
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
    assert rest(make(tmp_path)) == expected


UNSAVED: dict[str, Callable[[], tf.data.Dataset]] = {
    "a generator": lambda: tf.data.Dataset.from_generator(
        lambda: range(5), output_signature=tf.TensorSpec([])
    ),
    "random numbers": lambda: tf.data.Dataset.range(5).map(lambda number: tf.random.uniform(())),
}


@pytest.mark.parametrize("dataset", UNSAVED.values(), ids=UNSAVED.keys())
def test_what_tensorflow_cant_save_is_refused(dataset: Callable[[], Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValueError, match=r"^PerRank: .*elastic_dataset"):
        make(tmp_path, dataset())


def test_an_iterator_of_another_pipeline_is_refused(tmp_path: Path) -> None:
    state = make(tmp_path)
    state.commit(durable=True)
    state.flush()
    with pytest.raises(recover.PerRankError) as caught:
        make(tmp_path, tf.data.Dataset.range(20).batch(2).cache())
    assert caught.value.path == "PerRank"


def test_a_data_set_has_no_place_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"^PerRank: .*iter\(dataset\)"):
        recover.PerRank(SHUFFLED)
