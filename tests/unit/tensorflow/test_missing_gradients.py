"""A rank that lacks gradients: what it sends, and the words; real ranks are in the integration tests."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvdrecover.errors import MissingGradientError
from hvdrecover.tensorflow.averaging import _checked, lines
from hvdrecover.tensorflow.world import original, raised


def test_ranks_are_named_for_each_variable_that_only_some_have_a_gradient_of() -> None:
    absent = [[0, 1], [0], [0, 1, 2]]
    assert lines(absent, ["a", "b", "c"]) == [
        "b: missing on ranks 0, 2, there on rank 1",
        "c: missing on rank 2, there on ranks 0-1",
    ]


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("absent", [0.0, 0.5])
def test_results_are_held_back_if_ranks_differ(graph: bool, absent: float) -> None:
    variable = tf.Variable([1.0])

    def checked(summed: tf.Tensor) -> tf.Tensor:
        return _checked([tf.ones([1]), None], summed, [True], [variable])[0]

    run = tf.function(checked) if graph else checked
    summed = tf.constant([[absent], [0.5]])
    if not absent:
        assert run(summed).numpy().tolist() == [1.0]
        return
    with pytest.raises((MissingGradientError, tf.errors.OpError), match="gradient") as caught:
        run(summed)
    found = original(caught.value) if graph else caught.value
    assert isinstance(found, MissingGradientError)


def test_an_error_is_not_taken_for_one_that_was_raised_before() -> None:
    raised(MissingGradientError("gradients are missing", ["a: missing"], "Look."))
    other = tf.errors.UnknownError(None, None, "something else")
    assert original(other) is None
    assert original(ValueError(str(MissingGradientError("x", [], "")))) is None
