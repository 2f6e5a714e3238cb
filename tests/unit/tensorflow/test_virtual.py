"""Steps of virtual ranks in one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, StepError
from tests.unit.tensorflow.jobs import network

X = np.random.default_rng(0).normal(size=(19, 3)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(19, 2)).astype(np.float32)


class Training:
    """A network, its state with virtual ranks, and what gives its gradients."""

    def __init__(self, size: int = 3) -> None:
        self.model, self.optimizer = network(), keras.optimizers.Adam(0.1)
        self.data = recover.elastic_dataset((X, Y), 2, seed=3)
        self.state = recover.TensorFlowKerasState(
            self.model, self.optimizer, data=self.data, virtual_ranks=size
        )
        self.state.sync()
        self.traces = 0
        self.gradients = tf.function(self._gradients, reduce_retracing=True)

    def _gradients(self, x: tf.Tensor, y: tf.Tensor) -> Any:
        self.traces += 1
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.model(x, training=True) - y) ** 2)
        return tape.gradient(loss, self.model.trainable_variables)

    def first(self, **options: Any) -> Any:
        return next(iter(self.state.steps(self.data, **options)))


def test_gradients_are_averages_and_each_virtual_rank_has_its_own_statistics() -> None:
    training = Training()
    norm = training.model.layers[1]
    means: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    for step in training.state.steps(training.data):
        mine = []
        for x, y in step:
            rank = recover.virtual_rank()
            assert not means[rank] or norm.moving_mean.numpy().tobytes() == means[rank][-1]
            mine.append(training.gradients(x, y))
            step.add(mine[-1])
            means[rank].append(norm.moving_mean.numpy().tobytes())
        for each, parts in zip(step.gradients(), zip(*mine, strict=True), strict=True):
            np.testing.assert_allclose(each, sum(parts) / 3, rtol=1e-5, atol=1e-7)
        training.optimizer.apply(step.gradients(), training.model.trainable_variables)
    assert [len(each) for each in means.values()] == [4] * 3
    assert len({each[-1] for each in means.values()}) == 3
    assert training.traces == 2  # one of them for the shorter batches of the last step
    training.state.commit()
    assert norm.moving_mean.numpy().tobytes() == means[0][-1]


def test_missing_and_sparse_gradients_and_several_of_one_part() -> None:
    training = Training(2)
    table, unused = tf.Variable(np.zeros((4, 2), np.float32)), tf.Variable(1.0)
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 1]), tf.constant([4, 2]))
    step = training.first(variables=[table, unused])
    for number, _ in enumerate(step):
        step.add([slices, None])
        if number:
            step.add([None, None])
            step.add([slices, None])
    dense, none = step.gradients()
    assert none.numpy() == 0
    assert dense.numpy().tolist() == [[0, 0], [3, 3], [0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_sums_halves_and_several_dtypes(dtype: str) -> None:
    training = Training(3)
    variables = [tf.Variable(tf.zeros([3], dtype)), tf.Variable(1.0)]
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        step = training.first(variables=variables, op=hvd.Sum, compression=compression)
        for _ in step:
            step.add([tf.constant([1, 2, -4], dtype), tf.constant(0.5)])
        first, second = step.gradients()
        assert (first.dtype, first.numpy().tolist()) == (tf.as_dtype(dtype), [3, 6, -12])
        assert float(second) == 1.5


def in_the_inner_loop(training: Training, use: Callable[[Any], Any]) -> None:
    step = training.first()
    for _ in step:
        use(step)


def average_by_a_tape(training: Training) -> None:
    parts = iter(training.first())
    next(parts)
    with recover.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(training.model(X))
    tape.gradient(loss, training.model.trainable_variables)


STEP_ERRORS = [
    (lambda it: in_the_inner_loop(it, lambda step: None), r"state\.steps\(\): virtual rank 0 .*step\.add\("),
    (lambda it: in_the_inner_loop(it, lambda step: step.gradients()), r"step\.gradients\(\): "),
    (lambda it: in_the_inner_loop(it, lambda step: step.add([None])), r"step\.add\(\): 1 .* 6 variables"),
    (lambda it: it.first().add([None]), r"step\.add\(\): .*inner"),
    (lambda it: iter(it.data), r"dataset: .*state\.steps\(dataset\)"),
    (lambda it: it.data.record_batch(), r"dataset: .*record_batch\(\)"),
]
CONFIG_ERRORS = [
    (average_by_a_tape, r"gradients: .*tf\.GradientTape"),
    (lambda it: it.state.steps(recover.elastic_dataset(X, 2)), r".*elastic_dataset\(\)"),
    (lambda it: it.state.steps([X]), r"state\.steps\(\): a list "),
    (lambda it: it.first(op=hvd.Max), "op: .*op=Average .*op=Sum"),
    (lambda it: it.first(compression=hvd.Compression), "compression: "),
    (lambda it: it.first(variables=[]), r"variables: .*variables=\["),
    (lambda it: it.first(variables=[tf.Variable(1)]), "variables: .*int32"),
]


@pytest.mark.parametrize(
    ("kind", "use", "fact"),
    [(StepError, *each) for each in STEP_ERRORS] + [(ConfigError, *each) for each in CONFIG_ERRORS],
)
def test_a_wrong_use_is_refused(kind: type[Exception], use: Callable[[Training], Any], fact: str) -> None:
    training = Training()
    with pytest.raises(kind, match=f"^{fact}"):
        use(training)


def test_states_without_virtual_ranks_or_with_an_optimizer_that_averages_are_refused() -> None:
    model, data = network(), recover.elastic_dataset(X, 2)
    with pytest.raises(ConfigError, match=r"^state\.steps\(\): .*virtual_ranks="):
        recover.TensorFlowKerasState(model, data=data).steps(data)
    optimizer = recover.DistributedOptimizer(keras.optimizers.Adam())
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*DistributedOptimizer"):
        recover.TensorFlowKerasState(model, optimizer, data=data, virtual_ranks=2)
    state = recover.TensorFlowState([tf.Variable(1.0)], data=data, virtual_ranks=2)
    with pytest.raises(ConfigError, match=r"^state\.steps\(\): .*variables="):
        state.steps(data)


def averaged(value: tf.Tensor) -> tf.Tensor:
    return recover.allreduce(value, op=hvd.Sum, name="mine")


traced = tf.function(averaged)


@pytest.mark.parametrize(
    ("use", "call"),
    [
        (averaged, "allreduce"),
        (traced, "allreduce"),  # outside of the part, and so only run there
        (lambda value: recover.broadcast_object(1), "broadcast"),
        (lambda value: recover.grouped_allreduce([value]), "grouped_allreduce"),
        (lambda value: recover.join(), "join"),
    ],
)
def test_collectives_in_a_part_are_refused(use: Callable[[tf.Tensor], Any], call: str) -> None:
    training = Training(2)
    use(tf.ones([1]))
    parts = iter(training.first())
    next(parts)
    with pytest.raises((StepError, tf.errors.OpError)) as raised:
        use(tf.ones([1]))
    error = training.state._framework.original(raised.value) or raised.value
    assert isinstance(error, StepError)
    assert re.search(rf"^hvd\.{call}\(\): .* after ", str(error))
    parts.close()
    use(tf.ones([1]))


def test_a_forward_pass_between_the_parts_and_the_commit_is_refused() -> None:
    training = Training(2)
    for x, y in (step := training.first()):
        step.add(training.gradients(x, y))
    training.model(X, training=True)
    with pytest.raises(StepError, match=r"^model\..*moving_mean: .*state\.commit\(\)"):
        training.state.commit()
