"""A rank that lacks gradients: what it sends, and the words; real ranks are in the integration tests."""

from __future__ import annotations

import pytest
import tensorflow as tf

from hvdrecover.errors import MissingGradientError
from hvdrecover.tensorflow.averaging import Presence, lines
from hvdrecover.tensorflow.world import original, raised


def test_ranks_are_named_for_each_variable_that_only_some_have_a_gradient_of() -> None:
    absent = [[0, 1], [0], [0, 1, 2]]
    assert lines(absent, ["a", "b", "c"]) == [
        "b: missing on ranks 0, 2, there on rank 1",
        "c: missing on rank 2, there on ranks 0-1",
    ]


@pytest.mark.parametrize("dtype", [tf.int32, tf.bfloat16, tf.complex64])
def test_nothing_is_sent_for_variables_that_horovod_can_reduce_no_gradients_of(dtype: tf.DType) -> None:
    variable = tf.Variable(tf.ones([2], dtype))
    assert Presence([None], [variable], tf.constant(0.0)).filled == [None]


def test_no_slices_are_sent_for_a_sparse_gradient_that_is_missing() -> None:
    variable = tf.Variable(tf.ones([5, 3], tf.float64))
    slices = tf.IndexedSlices(tf.ones([2, 3], tf.float64), tf.constant([1, 4], tf.int64), tf.constant([5, 3]))
    Presence([slices], [variable], tf.constant(0.0))
    (sent,) = Presence([None], [variable], tf.constant(0.0)).filled
    assert (sent.values.shape, sent.values.dtype) == ((0, 3), tf.float64)
    assert (sent.indices.shape, sent.indices.dtype) == ((0,), tf.int64)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("absent", [0.0, 0.5])
def test_results_are_held_back_if_ranks_differ(graph: bool, absent: float) -> None:
    variable = tf.Variable([1.0])
    presence = Presence([tf.ones([1])], [variable], tf.constant(0.0))

    def checked(summed: tf.Tensor) -> tf.Tensor:
        return presence.checked(summed, [tf.ones([1]), None])[0]

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


def test_sparse_gradients_of_constants_are_not_known_to_be_constants() -> None:
    """As those of ``Embedding(tf.range(n))``: a Horovod built elsewhere gathers constants just once."""
    variable, static = tf.Variable(tf.zeros([3, 1])), []

    @tf.function
    def send(zero: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        constant = tf.IndexedSlices(tf.constant([[5.0], [6.0]]), tf.range(2), tf.shape(variable))
        (sent,) = Presence([constant], [variable], zero).filled
        static.extend(map(tf.get_static_value, (sent.values, sent.indices)))
        return sent.values, sent.indices

    values, indices = send(tf.constant(0.0))
    assert static == [None, None]
    assert (values.numpy().tolist(), indices.numpy().tolist()) == ([[5.0], [6.0]], [0, 1])
