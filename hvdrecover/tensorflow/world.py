"""Horovod's collectives on TensorFlow's tensors."""

from __future__ import annotations

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.state.horovod import HorovodWorld
from hvdrecover.tensorflow import faults


class TensorFlowWorld(HorovodWorld):
    """The ranks, by ``horovod.tensorflow``."""

    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        """Return whether an error came of a collective that failed because ranks were lost."""
        return faults.lost(error)

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """Everybody's arrays one after another, joined along the first axis; the lengths there may differ."""
        if self.size() == 1:
            return mine
        with tf.device("CPU:0"):
            joined: npt.NDArray[np.int64] = hvd.allgather(tf.constant(mine), name=name).numpy()
        return joined

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Fill ``buffer``, a uint8 array of the same length on all ranks, with the root's, in place."""
        if self.size() > 1 and len(buffer):
            with tf.device("CPU:0"):
                sent = hvd.broadcast(tf.constant(buffer), root, name=name)
            if self.rank() != root:
                buffer[:] = sent.numpy()
