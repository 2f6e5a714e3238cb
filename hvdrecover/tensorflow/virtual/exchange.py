"""The sum of partial sums of all processes, in the order of the tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdrecover.elastic.virtual.tree import Node, RunningSum

# Adding it changes no number, not even the sign of a zero: what has nothing to add is filled with it.
NOTHING = -0.0
_SUMMED_BY_HOROVOD = (tf.float32, tf.float64)
"""Dtypes whose sum of two Horovod rounds as TensorFlow does."""


class Exchange:
    """The way of the partial sums of one step between processes.

    Two are added up by Horovod's own allreduce, as x + y is y + x. Of more, a process gets its part by
    ``alltoall``, adds that up, and by ``allgather`` all get the result.

    Args:
        layout: the subtrees of each process.
        process: this one.
    """

    def __init__(self, layout: Sequence[Sequence[Node]], process: int) -> None:
        self._layout = layout
        self._process = process

    def total(self, mine: Sequence[tf.Tensor], dtype: tf.DType, length: int) -> tf.Tensor:
        """Return the sum of all leaves; of shape ``[length]``.

        Args:
            mine: the sums of this process's subtrees.
            dtype: of the sums.
            length: of each.

        Raises:
            tf.errors.OpError: a process was lost.
        """
        if len(self._layout) == 1:
            return mine[0]
        if sum(map(len, self._layout)) <= 2 and dtype in _SUMMED_BY_HOROVOD:
            given = mine[0] if mine else tf.fill([length], tf.constant(NOTHING, dtype))
            return hvd.allreduce(given, op=hvd.Sum)
        return self._by_parts(mine, dtype, length)

    def _by_parts(self, mine: Sequence[tf.Tensor], dtype: tf.DType, length: int) -> tf.Tensor:
        processes = len(self._layout)
        bounds = [min(length, -(-length // processes) * each) for each in range(processes + 1)]
        counts = [stop - start for start, stop in pairwise(bounds)]
        pieces = [piece[start:stop] for start, stop in pairwise(bounds) for piece in mine]
        sent = tf.concat(pieces, 0) if pieces else tf.zeros([0], dtype)
        splits = tf.constant([count * len(mine) for count in counts], tf.int32)
        received = tf.bitcast(hvd.alltoall(_as_sent(sent), splits=splits)[0], dtype)
        nodes = [node for each in self._layout for node in each]
        rows = tf.split(received, [counts[self._process]] * len(nodes))
        running = RunningSum[tf.Tensor](nodes[-1].stop, tf.add)
        for node, row in zip(nodes, rows, strict=True):
            running.push(node, row)
        return tf.bitcast(hvd.allgather(_as_sent(running.values[0])), dtype)


def _as_sent(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of a dtype that Horovod can send."""
    return tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor
