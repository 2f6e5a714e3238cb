"""The presence of gradients: which variables have one on which ranks.

A rank that has none where others have one would leave them waiting in the allreduce. So it sends zeros, and
each rank says along with its gradients of which variables they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdrecover.errors import MissingGradientError
from hvdrecover.guard.votes import first_lines, named
from hvdrecover.state.adapter import gather_json
from hvdrecover.tensorflow import faults
from hvdrecover.tensorflow.own_gradients import Gradient
from hvdrecover.tensorflow.variables import Variable, name_of, raw
from hvdrecover.tensorflow.world import TensorFlowWorld

# What is not zero somewhere is not zero in what Horovod makes of it; so it can go with gradients.
KEEPING_OPS = (hvd.Average, hvd.Sum, hvd.Max)

_DTYPES = (tf.float16, tf.float32, tf.float64)  # of gradients that Horovod can reduce
_SLICES = "_hvdrecover_slices"  # of a variable: its last sparse gradient's dtypes


class Presence:
    """The variables that this rank has gradients of, and what to send for those that it has none of.

    Args:
        gradients: one for each variable, or None.
        variables: what they are gradients of.
        zero: a zero that must not be known when graphs are made, so that no collective is one of constants.
    """

    def __init__(self, gradients: Sequence[Gradient], variables: Sequence[Variable], zero: tf.Tensor) -> None:
        self._here = [gradient is not None for gradient in gradients]
        self._variables = variables
        self._zero = zero
        self.filled = [
            _nothing(variable, zero) if gradient is None else _known(gradient, variable, zero)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        """The gradients, and zeros where there is none; None where no rank can have one."""

    def told(self, dtype: tf.DType) -> tf.Tensor:
        """Return what to reduce, of shape ``[2, len(variables)]``: 1 where one is absent; is present."""
        ones = tf.cast([[not here for here in self._here], self._here], dtype)
        return ones + tf.cast(self._zero, dtype)

    def checked(self, summed: tf.Tensor, results: list[Gradient]) -> list[Gradient]:
        """The results, which can be had only if all ranks have gradients of the same variables.

        Args:
            summed: what all ranks have told, reduced.
            results: the reduced gradients; None stays None.

        Raises:
            MissingGradientError: they have not; in a graph, an error of TensorFlow's that holds its text.
        """
        there = [each for each in results if each is not None]
        if tf.executing_eagerly():
            if bool(_differ(summed)):
                self._fail()
            return results

        def fail() -> tf.Tensor:
            with tf.device("CPU:0"):
                return tf.py_function(self._fail, [], tf.bool)

        # To give up amid collectives would leave other ranks in them.
        with tf.control_dependencies(tf.nest.flatten(there, expand_composites=True)):
            differ = _differ(summed)
        with tf.control_dependencies([tf.cond(differ, fail, lambda: tf.constant(True))]):
            held = iter(tf.nest.map_structure(tf.identity, there, expand_composites=True))
        return [each if each is None else next(held) for each in results]

    def _fail(self) -> None:
        absent = [place for place, here in enumerate(self._here) if not here]
        error = MissingGradientError(
            "gradients are missing on some of the ranks",
            lines(
                gather_json(TensorFlowWorld(), absent, "hvdrecover.gradients.absent"),
                [name_of(variable) for variable in self._variables],
            ),
            "Have all ranks compute the loss from the same variables; where one has no use for a variable, "
            "add 0.0 * tf.reduce_sum(variable) to the loss.",
        )
        faults.raised(error)
        raise error


def lines(absent: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """A line for each variable that has a gradient on some of the ranks only.

    Args:
        absent: by rank, the places of the variables that have no gradient.
        names: of the variables.
    """
    found = []
    for place, name in enumerate(names):
        without = [rank for rank, places in enumerate(absent) if place in places]
        with_it = [rank for rank, places in enumerate(absent) if place not in places]
        if without and with_it:
            found.append(f"{name}: missing on {named(without)}, there on {named(with_it)}")
    return first_lines(found)


def _differ(summed: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(tf.reduce_all(summed != 0, axis=0))


def _known(gradient: Gradient, variable: Variable, zero: tf.Tensor) -> Gradient:
    """Remember a sparse gradient's dtypes; it may be constant, as that of ``Embedding(tf.range(n))``."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    values, indices = gradient.values, gradient.indices
    setattr(raw(variable), _SLICES, (values.dtype, indices.dtype))
    values, indices = values + tf.cast(zero, values.dtype), indices + tf.cast(zero, indices.dtype)
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _nothing(variable: Variable, zero: tf.Tensor) -> Gradient:
    """A gradient that adds nothing; sparse and without slices if the last that was seen was sparse."""
    inner = raw(variable)
    if inner.dtype not in _DTYPES:
        return None
    if (dtypes := getattr(inner, _SLICES, None)) is None:
        return tf.fill(tf.shape(inner), tf.cast(zero, inner.dtype))
    values, indices = dtypes
    none = tf.cast(zero, indices)
    slices = tf.fill([none, *inner.shape[1:]], tf.cast(zero, values))
    return tf.IndexedSlices(slices, tf.fill([none], none), tf.shape(inner, indices))
