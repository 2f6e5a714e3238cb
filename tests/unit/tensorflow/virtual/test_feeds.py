"""Batches of virtual ranks: whoever makes them, they are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.commits.randomness import stream
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.framework import TensorFlowFramework
from hvdrecover.tensorflow.virtual.feeds import feed

SIZE = 4


class Ranks:
    """The facts about virtual ranks that a feed asks for."""

    def __init__(self, *carried: int) -> None:
        self.carried = Carried(carried, SIZE)
        self.steps = 0

    def seeds(self, step: int, rank: int) -> Callable[[str], int]:
        return stream(7, f"step {step}", rank)

    def sample_seeds(self, step: int, rank: int) -> Callable[[str], int]:
        return stream(7, f"samples {step}", rank)

    def any_has_more(self, mine: bool) -> bool:
        return mine


def noisy(numbers: tf.Tensor, *, seed: tf.Tensor) -> tf.Tensor:
    return tf.cast(numbers, tf.float32) + 0.5 * tf.random.stateless_uniform(tf.shape(numbers), seed)


def of_arrays() -> recover.ElasticDataset:
    return recover.elastic_dataset(np.arange(27), 2, seed=3, transform=noisy)


def of_dataset() -> recover.ElasticDataset:
    return recover.elastic_dataset(tf.data.Dataset.range(27), 2, shuffle=False, transform=noisy)


def batches(
    make: Callable[[], recover.ElasticDataset], *carried: int, skip: int = 0
) -> list[dict[int, list[float]]]:
    """Go through an epoch; return each step's batches by virtual rank."""
    data = make()
    data.order.dealt_to = lambda: Carried(carried, SIZE)
    data.order.place(0, 1)
    data.order.record(2 * skip)
    ranks: Any = Ranks(*carried)
    found = []
    for step in feed(data, {"data": data}, TensorFlowFramework()).begin(ranks):
        found.append({rank: step.fetch(rank).numpy().tolist() for rank in carried})
        step.done()
    return found


@pytest.fixture(params=[of_arrays, of_dataset])
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_each_sample_comes_once_and_the_tail_is_short(make: Any) -> None:
    steps = batches(make, 0, 1, 2, 3)
    numbers = [int(number) for step in steps for batch in step.values() for number in batch]
    assert [len(batch) for step in steps for batch in step.values()] == [2] * 12 + [1] * 4
    assert sorted(set(numbers)) == list(range(27))


def test_who_makes_them_does_not_matter(make: Any) -> None:
    """Not for which samples they are, and not for the noise."""
    expected = batches(make, 0, 1, 2, 3)
    noise = [number % 1 for step in expected for batch in step.values() for number in batch]
    assert len(set(noise)) == len(noise)
    pairs = zip(batches(make, 0), batches(make, 1, 2, 3), strict=True)
    assert [{**one, **other} for one, other in pairs] == expected
    assert batches(make, 1, 3, skip=2) == [{rank: each[rank] for rank in (1, 3)} for each in expected[2:]]


def test_spares_count_steps(make: Any) -> None:
    assert batches(make) == [{}] * 4


augment = keras.layers.RandomContrast(0.5)


@pytest.mark.parametrize(
    "transform",
    [
        lambda numbers: tf.random.normal([]) + tf.cast(numbers, tf.float32),
        lambda numbers: augment(tf.cast(numbers, tf.float32)[:, None, None, None]),
    ],
)
def test_random_numbers_that_depend_on_the_order_of_batches(transform: Any) -> None:
    data = recover.elastic_dataset(np.arange(27), 2, transform=transform)
    with pytest.raises(ConfigError, match=r"^transform: .* seed"):
        feed(data, {"data": data}, TensorFlowFramework())


def test_iterators_of_the_virtual_ranks_own() -> None:
    def iterator(rank: int, size: int) -> Iterator[Any]:
        return iter(tf.data.Dataset.range(9).shard(size, rank).take(2))

    iterators = recover.PerRank(iterator)
    iterators.become_virtual(SIZE, lambda: 0)
    ranks: Any = Ranks(1, 2)
    source = feed(iterators, {"iterators": iterators}, TensorFlowFramework())
    for epoch in (1, 2):  # iterators have ended, and are made anew
        steps = [[int(step.fetch(rank)) for rank in (1, 2)] for step in source.begin(ranks)]
        assert steps == [[1, 2], [5, 6]]
        assert iterators.taken == 2 * epoch
