"""Horovod's allreduces, run in each call of a graph, also if all that they are given is constant.

TensorFlow computes operations of constants once, while it makes a graph. A process that makes its graphs
again after a recovery would then wait for ranks that have theirs. Horovod's other collectives are declared
stateful, which forbids that. Allreduces are not, as Horovod's tape puts each into a condition of its own, and
TensorFlow would run stateful conditions one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdrecover.tensorflow.variables import counter, raw


@functools.wraps(hvd.allreduce, assigned=())
def allreduce(tensor: Any, *args: Any, **options: Any) -> Any:
    """Reduce a tensor over all ranks, as ``horovod.tensorflow.allreduce``.

    Args:
        tensor: a tensor, a variable or ``tf.IndexedSlices``; of the same shape on all ranks.
        args: Horovod's, as for the following.
        options: ``op``, ``name``, ``process_set``, ….

    Examples:
        >>> mean = recover.allreduce(tf.constant([1.0, 2.0]), name="mean")
    """
    return hvd.allreduce(_unfolded(tensor), *args, **options)


@functools.wraps(hvd.grouped_allreduce, assigned=())
def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Reduce tensors over all ranks as one group, as ``horovod.tensorflow.grouped_allreduce``.

    Args:
        tensors: see `allreduce`, as for the following.
        args: see there.
        options: see there.

    Examples:
        >>> mean, total = recover.grouped_allreduce([tf.constant(1.0), tf.constant(2.0)], name="both")
    """
    return hvd.grouped_allreduce([_unfolded(each) for each in tensors], *args, **options)


def _unfolded(tensor: Any) -> Any:
    """Return a tensor of the same values and shape that TensorFlow does not take for a constant."""
    if not tf.inside_function() or isinstance(tensor, tf.IndexedSlices):  # slices are gathered
        return tensor
    given = tf.convert_to_tensor(raw(tensor))
    # The choice depends on a variable. TensorFlow still computes a reshape by a variable, or a placeholder
    # with a default, in advance; and to add a zero would turn -0.0 into 0.0.
    return tf.where(_zero() < 1, given, tf.zeros_like(given))


@functools.cache
def _zero() -> tf.Variable:
    return counter(tf.int32)
