"""Scalars for TensorBoard, written by TensorFlow."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

import tensorflow as tf

FLUSH_SECONDS = 10
QUEUE = 1000  # events, before a step waits for the file system

_files = itertools.count()
_v1 = tf.compat.v1


class TensorFlowWriter:
    """A TensorBoard run; see `hvdrecover.state.adapter.Writer`.

    The writer of ``tf.compat.v1`` writes all scalars of a step as one event, with the time of the step, and
    marks steps that a restart takes back. ``tf.summary`` can do neither, and takes 200 times as long.

    Args:
        folder: path or URL of the run.
        first: TensorBoard drops this step and later ones of earlier files.
    """

    def __init__(self, folder: str, first: int) -> None:
        # TensorBoard reads files of the same second in the order of their suffixes.
        suffix = f".{os.getpid()}.{next(_files):06}"
        with tf.Graph().as_default():
            self._writer = _v1.summary.FileWriter(
                folder, max_queue=QUEUE, flush_secs=FLUSH_SECONDS, filename_suffix=suffix
            )
        self._writer.add_session_log(_v1.SessionLog(status=_v1.SessionLog.START), first)

    def scalars(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Write the scalars of a step."""
        each = [_v1.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(_v1.Event(wall_time=time, step=step, summary=_v1.Summary(value=each)))

    def close(self) -> None:
        """Write all to the file and close it."""
        self._writer.close()
