"""The code that tells numbers that are finite from others, compiled and by TensorFlow; and gates."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdrecover.tensorflow import finite
from hvdrecover.tensorflow.finite import Gate, each_finite
from hvdrecover.tensorflow.framework import TensorFlowFramework

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
BAD = [math.nan, math.inf, -math.inf]
LARGE = 1 << 17

pytestmark = pytest.mark.usefixtures("operations")


def edges(dtype: tf.DType, size: int) -> Any:
    """Numbers at the edges of what is finite, over and over."""
    return np.resize(np.array([dtype.max, dtype.min, 0.0, -0.0, 1.0], dtype.as_numpy_dtype), size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 64, 1000, LARGE])
def test_one_bad_number_is_found_wherever_it_is(dtype: tf.DType, size: int) -> None:
    numbers = edges(dtype, size)
    for place in {0, size // 2, size - 1}:
        for value in BAD:
            bad = numbers.copy()
            bad[place] = value
            assert each_finite([tf.constant(numbers), tf.constant(bad)]).numpy().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_every_pattern_of_bits_is_judged_as_tensorflow_judges_it(dtype: tf.DType) -> None:
    numbers = tf.bitcast(tf.range(-(1 << 15), 1 << 15, dtype=tf.int32), tf.uint16)[:, 0][::13]
    patterns = tf.bitcast(numbers, dtype)
    assert np.array_equal(each_finite(tf.unstack(patterns)), tf.math.is_finite(patterns))


def test_shapes_dtypes_and_sizes_may_be_mixed() -> None:
    tensors = [
        tf.fill([LARGE], math.nan),
        tf.zeros([2, 3, 4]),
        tf.constant(math.inf, tf.float64),
        tf.zeros([0, 5]),
        tf.ones([2, LARGE], tf.bfloat16),
        tf.constant([3e38 + 3e38j], tf.complex64),  # finite, unlike its absolute value
        tf.constant([complex(0, math.nan)]),
    ]
    expected = [False, True, False, True, True, True, False]
    assert each_finite(tensors).numpy().tolist() == expected

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def of_unknown_size(tensor: tf.Tensor) -> tf.Tensor:
        return each_finite([tf.zeros([3]), tensor, *tensors])

    for first in (1.0, math.nan):
        assert of_unknown_size(tf.constant([first])).numpy().tolist() == [True, first == 1.0, *expected]


def shut(error: Exception | None, asked: list[Any]) -> Gate:
    """A gate that fails with an error, if there is one."""

    def ask(all_ranks: list[bool], mine: list[bool]) -> None:
        asked.append((all_ranks, mine))
        if error is not None:
            raise error

    return Gate(ask)


@pytest.mark.parametrize("graph", [False, True])
def test_a_gate_asks_only_if_not_all_is_finite(graph: bool) -> None:
    asked: list[Any] = []
    gate = shut(None, asked)
    go = tf.function(gate) if graph else gate
    mine = tf.constant([True, False])
    assert bool(go(tf.constant([True, True]), mine))
    assert asked == []
    assert not bool(go(tf.constant([False, True]), mine))
    assert asked == [([False, True], [True, False])]


@pytest.mark.parametrize("graph", [False, True])
def test_an_error_of_who_is_asked_fails_what_waits_for_the_gate(graph: bool) -> None:
    gate = shut(ValueError("it is bad, ≠ 0"), [])
    kept = tf.Variable(1.0)

    def step(flags: tf.Tensor) -> None:
        with tf.control_dependencies([gate(flags, flags)]):
            kept.assign_add(1.0)

    if graph:
        step = tf.function(step)
    for _ in range(10):
        with pytest.raises(tf.errors.OpError, match="ValueError: it is bad, ≠ 0"):
            step(tf.constant([False]))
    assert float(kept) == 1.0
    step(tf.constant([True]))
    assert float(kept) == 2.0


def test_a_graph_that_has_outlived_its_gate_fails() -> None:
    gate = shut(None, [])
    mine = tf.constant([False])
    through = tf.function(gate).get_concrete_function(mine, mine)
    assert not through(mine, mine)
    gone = weakref.ref(gate)
    del gate
    gc.collect()
    if finite._operations is None:
        assert gone() is not None  # the graph keeps it
    else:
        assert gone() is None
        with pytest.raises(tf.errors.OpError, match="gone"):
            through(mine, mine)


def test_gates_of_one_graph_are_told_apart() -> None:
    asked: list[list[Any]] = [[], []]
    gates = [shut(None, each) for each in asked]

    @tf.function
    def through(flags: tf.Tensor) -> tf.Tensor:
        return tf.stack([gate(flags, flags) for gate in gates])

    assert through(tf.constant([False])).numpy().tolist() == [False, False]
    assert asked == [[([False], [False])]] * 2


def test_a_gate_keeps_nothing_alive() -> None:
    class Big:
        def ask(self, all_ranks: list[bool], mine: list[bool]) -> None: ...

    big = Big()
    gone = weakref.ref(big)
    gate = Gate(big.ask)
    gate(tf.constant([True]), tf.constant([True]))
    del gate, big
    gc.collect()
    assert gone() is None


def test_trained_variables_that_are_not_finite_are_named() -> None:
    layers = [keras.layers.Dense(2, name="first"), keras.layers.BatchNormalization(name="second")]
    model = keras.Sequential([*layers, keras.layers.Dense(1, name="third", dtype="float64")], name="net")
    model.build((None, 3))
    first, second, third = model.layers
    first.kernel.assign(tf.fill([3, 2], 3e38))  # finite, unlike its norm
    second.moving_mean.assign([math.nan, 0.0])  # not trained
    framework = TensorFlowFramework()
    assert framework.not_finite(framework.trained(model)) == []
    third.bias.assign([math.inf])
    second.gamma.assign([1.0, math.nan])
    found = framework.not_finite(framework.trained(model))
    assert [name.removeprefix("net/") for name in found] == ["second/gamma", "third/bias"]
