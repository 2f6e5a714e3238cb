"""Horovod's collectives on TensorFlow's tensors, and how to tell that ranks were lost.

TensorFlow hands a failed collective on as an error of some kind, with a text that may name the node. It does
the same with errors that user code raises inside a graph. Neither kind nor text can be relied on. But once a
rank is lost, every collective fails; and while all ranks are there, a collective that the others do not take
part in waits. So an error that may come of a lost rank is followed by a collective of our own, the probe: if
that fails, ranks were lost.
"""

from __future__ import annotations

import threading

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hvdrecover import config
from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.state.horovod import HorovodWorld

# The errors of a failed collective, and of operations that TensorFlow cancels for that reason.
_POSSIBLE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
_MARGIN = 5.0  # seconds beyond the time after which Horovod gives up a rank that says nothing


class TensorFlowWorld(HorovodWorld):
    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        """Return whether an error came of a collective that failed because ranks were lost.

        If it did not, but might have, this takes until a lost rank would have been given up, unless all ranks
        ask at once.
        """
        global _probe
        if not isinstance(error, _POSSIBLE):
            return False
        if not hvd.is_initialized():
            return True
        if _probe is None or not _probe.is_alive():  # a second one of the same name would fail for that
            _probe = _Probe()
            _probe.start()
        _probe.join(config.read().collective_seconds + _MARGIN)
        return _probe.has_failed

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        if self.size() == 1:
            return mine
        with tf.device("CPU:0"):
            joined: npt.NDArray[np.int64] = hvd.allgather(tf.constant(mine), name=name).numpy()
        return joined

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        if self.size() > 1 and len(buffer):
            with tf.device("CPU:0"):
                sent = hvd.broadcast(tf.constant(buffer), root, name=name)
            if self.rank() != root:
                buffer[:] = sent.numpy()


class _Probe(threading.Thread):
    """The probe. It runs on its own thread, as it may wait for as long as the job lasts."""

    def __init__(self) -> None:
        super().__init__(name="hvdrecover-probe", daemon=True)
        self.has_failed = False

    def run(self) -> None:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def probe() -> tf.Tensor:
            return hvd.allreduce(tf.zeros(()), op=hvd.Sum, name="hvdrecover_probe", ignore_name_scope=True)

        try:
            with tf.device("CPU:0"):
                probe()
        except tf.errors.OpError:
            self.has_failed = True


_probe: _Probe | None = None
_raised: Exception | None = None


def raised(error: Exception) -> None:
    """Remember an error of ours that is raised where it may have to pass through a graph."""
    global _raised
    _raised = error


def original(error: BaseException) -> Exception | None:
    """Return the error of ours that TensorFlow has made another one of; None if it has not."""
    passed = isinstance(error, tf.errors.OpError) and _raised is not None and str(_raised) in str(error)
    return _raised if passed else None
