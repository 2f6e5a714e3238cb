"""Horovod's collectives on TensorFlow's tensors."""

from __future__ import annotations

from collections.abc import Sequence

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.elastic.horovod import Ranks
from hvdrecover.tensorflow import faults


class TensorFlowWorld(Ranks):
    """The ranks, by ``horovod.tensorflow``."""

    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        """Return whether an error came of a collective that failed because ranks were lost."""
        return faults.lost(error)

    def allgather(self, values: Sequence[int], name: str) -> npt.NDArray[np.int64]:
        """Everybody's values, as int64 of shape ``[size, len(values)]``."""
        mine = np.array([list(values)], dtype=np.int64)
        if self.size() == 1:
            return mine
        with tf.device("CPU:0"):
            gathered: npt.NDArray[np.int64] = hvd.allgather(tf.constant(mine), name=name).numpy()
        return gathered

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer``, a uint8 array of the same length on all ranks, with the root's, in place."""
        if self.size() > 1 and len(buffer):
            with tf.device("CPU:0"):
                sent = hvd.broadcast(tf.constant(buffer), root, name=name)
            if self.rank() != root:
                buffer[:] = sent.numpy()
