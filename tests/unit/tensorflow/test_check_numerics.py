"""The errors of TensorFlow's own check of numbers, in a job of one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.elastic.guard.judge import RolledBack
from hvdrecover.errors import NumericsError
from hvdrecover.tensorflow.check_numerics import found_by


@pytest.fixture
def checking() -> Iterator[None]:
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def logarithm(x: tf.Tensor) -> tf.Tensor:
    return tf.math.log(x)


def checked(x: tf.Tensor) -> tf.Tensor:
    return tf.debugging.check_numerics(tf.math.log(x), "my words: {curly}")


def error_of(function: Any, x: float) -> tf.errors.InvalidArgumentError:
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        function(tf.constant([1.0, x]))
    return raised.value


@pytest.mark.usefixtures("checking")
def test_a_check_of_all_operations_names_operation_and_line() -> None:
    eager = found_by(error_of(logarithm, -1.0))
    assert eager == 'NaN in output 0 of op "Log", says check_numerics'
    graph = found_by(error_of(tf.function(logarithm), 0.0))
    assert graph.startswith('-Inf in output 0 of op "Log" (node Log, ')
    assert f"{Path(__file__).name} (L" in graph
    assert graph.endswith(") logarithm), says check_numerics")


@pytest.mark.parametrize("graph", [False, True])
def test_a_check_in_the_model_is_told_in_its_own_words(graph: bool) -> None:
    found = found_by(error_of(tf.function(checked) if graph else checked, -1.0))
    assert found == 'NaN in "my words: {curly}", says check_numerics'


def test_other_errors_are_not_of_a_check() -> None:
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        tf.reshape(tf.ones([3]), [2])
    assert found_by(raised.value) == ""
    assert found_by(ValueError("x : Tensor had NaN values")) == ""


@pytest.mark.parametrize(
    ("policy", "kind"), [("raise", NumericsError), ("skip", RolledBack), ("rollback", RolledBack)]
)
def test_a_check_comes_to_what_the_guard_says(policy: Any, kind: type[Exception]) -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.build((None, 2))
    guard = recover.Guard(numerics=policy)
    data = recover.elastic_dataset(np.array([1.0, -1.0]), batch_size=2)
    state = recover.TensorFlowKerasState(model, keras.optimizers.SGD(0.5), data=data, guard=guard)
    state.sync()
    next(iter(data))
    error = error_of(checked, -1.0)
    verdict = state._recovery.cause(error)
    assert isinstance(verdict, kind)
    if kind is NumericsError:
        assert ': NaN in "my words' in str(verdict)
    assert state._recovery.cause(ValueError("mine")).args == ("mine",)


def test_without_a_guard_a_check_is_left_alone() -> None:
    state = recover.TensorFlowState([tf.Variable(1.0)])
    error = error_of(checked, -1.0)
    assert state._recovery.cause(error) is error
