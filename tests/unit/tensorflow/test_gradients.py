"""Gradients and collectives of one rank; what several ranks make of them is tested with real ranks."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, MissingGradientError
from hvdrecover.tensorflow.averaging import _checked
from hvdrecover.tensorflow.collectives import original


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_a_persistent_tape_gives_gradients_twice_and_other_methods_are_its_own(kind: Any) -> None:
    variable, constant = kind([1.0, 2.0, 3.0], name="w"), tf.constant(2.0)
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
        ({"groups": [["w"]]}, "groups"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named}: "):
        recover.PartialDistributedGradientTape(tf.GradientTape(), **options)


@pytest.mark.parametrize("graph", [False, True])
def test_results_are_held_back_if_ranks_differ(graph: bool) -> None:
    variable = tf.Variable([1.0])

    def checked(summed: tf.Tensor) -> tf.Tensor:
        return _checked([tf.ones([1]), None], summed, [True], [variable])[0]

    run = tf.function(checked) if graph else checked
    assert run(tf.constant([[0.0], [0.5]])).numpy().tolist() == [1.0]
    with pytest.raises((MissingGradientError, tf.errors.OpError), match="gradient") as caught:
        run(tf.constant([[0.5], [0.5]]))
    found = original(caught.value) if graph else caught.value
    assert isinstance(found, MissingGradientError)


def test_an_error_is_not_taken_for_one_that_was_raised_before(monkeypatch: pytest.MonkeyPatch) -> None:
    before = MissingGradientError("gradients are missing", ["a: missing"], "Look.")
    monkeypatch.setattr("hvdrecover.tensorflow.collectives._raised", before)
    other = tf.errors.UnknownError(None, None, "something else")
    assert original(other) is None
    assert original(ValueError(str(MissingGradientError("x", [], "")))) is None


@pytest.mark.parametrize("value", [[-0.0, float("nan")], [1, -2], [[1.5], [-2.5]]])
def test_an_allreduce_of_constants_keeps_values_and_shapes(value: Any) -> None:
    given = np.array(value)

    @tf.function
    def step() -> Any:
        tensor = recover.allreduce(tf.constant(given), name="values", op=recover.Sum)
        assert tensor.shape == given.shape
        return tensor

    assert step().numpy().tobytes() == given.tobytes()
