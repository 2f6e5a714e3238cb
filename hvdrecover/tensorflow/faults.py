"""Telling that ranks were lost, and errors of ours, from errors of the user's own.

TensorFlow hands a failed collective on as an error of some kind, with a text that names the node, if that; so
does it with errors that user code raised inside a graph. Neither kind nor text can be relied on. But once a
rank is lost, every collective fails; and while all are there, one that the others don't take part in waits.
So an error that may be of that sort is followed by a collective of our own: if that fails, ranks were lost.
"""

from __future__ import annotations

import threading

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdrecover import config

# What a failed collective, or what was cancelled because of it, can come as.
_POSSIBLE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
_MARGIN = 5.0  # seconds beyond the time after which Horovod gives up a rank that says nothing


class _Probe:
    """A collective that is of no use; on a thread of its own, as it may wait for as long as the job lasts."""

    def __init__(self) -> None:
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="hvdrecover-probe", daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        """Return whether it still does."""
        return self._thread.is_alive()

    def fails(self, seconds: float) -> bool:
        """Return whether it fails within a time."""
        self._thread.join(seconds)
        return self._failed

    def _run(self) -> None:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def probe() -> tf.Tensor:
            return hvd.allreduce(tf.zeros(()), op=hvd.Sum, name="hvdrecover_probe", ignore_name_scope=True)

        try:
            with tf.device("CPU:0"):
                probe()
        except tf.errors.OpError:
            self._failed = True


_last: _Probe | None = None
_raised: Exception | None = None


def raised(error: Exception) -> None:
    """An error of ours is raised where it may have to pass through a graph."""
    global _raised
    _raised = error


def original(error: BaseException) -> Exception | None:
    """The error of ours that TensorFlow has made another one of, if any."""
    passed = isinstance(error, tf.errors.OpError) and _raised is not None and str(_raised) in str(error)
    return _raised if passed else None


def lost(error: BaseException) -> bool:
    """Return whether an error came of a collective that failed because ranks were lost.

    If it did not, but might have, this takes until a lost rank would have been given up, unless all ranks ask
    at once.
    """
    global _last
    if not isinstance(error, _POSSIBLE):
        return False
    if not hvd.is_initialized():
        return True
    if _last is None or not _last.waits:  # a second one of the same name would fail for that
        _last = _Probe()
    return _last.fails(config.read().collective_seconds + _MARGIN)
