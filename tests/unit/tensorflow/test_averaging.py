"""Gradients of one rank; what several make of them is tested with real ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.averaging import Reduction, _name


@pytest.fixture(params=["keras", "tensorflow"])
def variable(request: pytest.FixtureRequest) -> Any:
    if request.param == "keras":
        return keras.Variable([1.0, 2.0, 3.0], name="w")
    return tf.Variable([1.0, 2.0, 3.0], name="w")


def test_a_persistent_tape_gives_gradients_twice_and_other_methods_are_its_own(variable: Any) -> None:
    constant = tf.constant(2.0)
    with recover.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        tape.watch(constant)
        loss = tf.reduce_sum(tf.convert_to_tensor(variable) * constant)
    assert tape.gradient(loss, [variable])[0].numpy().tolist() == [2.0] * 3
    assert float(tape.gradient(loss, constant)) == 6.0
    assert len(tape.watched_variables()) == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"process_set": hvd.ProcessSet([0])}, "process_set"),
        ({"local_layers": ["dense"]}, "local_layers"),
        ({"num_groups": -1}, "groups"),
    ],
)
def test_what_cannot_be_had_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        recover.PartialDistributedGradientTape(tf.GradientTape(), **options)


def test_groups_hold_one_dtype_each_and_all_dense_gradients() -> None:
    variables = [tf.Variable(0.0), tf.Variable(0.0, dtype=tf.float64), tf.Variable(0.0), tf.Variable([0.0])]
    gradients: list[Any] = [tf.constant(0.0), tf.constant(0.0, tf.float64), tf.constant(0.0)]
    gradients.append(tf.IndexedSlices(tf.constant([1.0]), tf.constant([0]), tf.constant([1])))

    def groups(asked: Any) -> list[list[int]]:
        return Reduction(groups=asked)._groups_of(gradients, variables)

    assert groups(None) == [[0, 2], [1]]
    assert sorted(place for group in groups(2) for place in group) == [0, 1, 2]
    assert groups(99) == [[0], [1], [2]]
    assert groups([[variables[2]]]) == [[0], [1], [2]]


@pytest.mark.parametrize("groups", [0, -1, [["w"]]])
def test_groups_that_cannot_be_are_refused(groups: Any) -> None:
    with pytest.raises(ConfigError, match="groups"):
        recover.DistributedGradientTape(tf.GradientTape(), groups=groups)


def test_the_name_of_a_collective_does_not_depend_on_what_the_process_has_made_before() -> None:
    def name() -> str:
        model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(2)])
        model.build((None, 2))
        variables = model.trainable_variables
        return _name(None, variables)

    assert name() == name()
    other = tf.Variable(np.zeros(5, np.float32))
    assert _name(None, [other]) != name()
