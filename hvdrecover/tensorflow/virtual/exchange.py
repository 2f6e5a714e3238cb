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
    """How the partial sums of one step go between processes.

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
        if dtype == tf.bfloat16:  # which Horovod can't send
            return tf.bitcast(
                self._by_parts([tf.bitcast(each, tf.uint16) for each in mine], dtype, length), dtype
            )
        return self._by_parts(mine, dtype, length)

    def _by_parts(self, mine: Sequence[tf.Tensor], dtype: tf.DType, length: int) -> tf.Tensor:
        """The same, added up by parts; sent, and returned, in a dtype that Horovod can send."""
        processes = len(self._layout)
        bounds = [min(length, -(-length // processes) * each) for each in range(processes + 1)]
        counts = [stop - start for start, stop in pairwise(bounds)]
        pieces = [piece[start:stop] for start, stop in pairwise(bounds) for piece in mine]
        sent = tf.concat(pieces, 0) if pieces else tf.zeros([0], _sent_as(dtype))
        splits = tf.constant([count * len(mine) for count in counts], tf.int32)
        received, _ = hvd.alltoall(sent, splits=splits)
        count = counts[self._process]
        nodes = [node for each in self._layout for node in each]
        running = RunningSum[tf.Tensor](nodes[-1].stop, tf.add)
        for place, node in enumerate(nodes):
            row = received[place * count : (place + 1) * count]
            running.push(node, tf.bitcast(row, dtype) if row.dtype != dtype else row)
        (total,) = running.values
        return hvd.allgather(tf.bitcast(total, sent.dtype) if sent.dtype != dtype else total)


def _sent_as(dtype: tf.DType) -> tf.DType:
    return tf.uint16 if dtype == tf.bfloat16 else dtype
