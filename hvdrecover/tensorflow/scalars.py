"""The scalars of a state: times of training steps, and norms of gradients.

Graphs leave these numbers in variables: that costs next to nothing, and no rank waits for them. Python reads
the variables when it next passes. One reduction of gradients is one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdrecover.scalars import Scalars
from hvdrecover.tensorflow.collectives import counter, xla_compiles
from hvdrecover.tensorflow.variables import Gradient


class _Marks:
    """The variables in which graphs leave numbers."""

    def __init__(self) -> None:
        self.steps = counter()  # number of reductions
        self.waited = counter(tf.float64)  # seconds of waiting for gradients of other ranks, in all
        self.averaged = counter(tf.float64)  # norm of the last averaged gradients


_marks: _Marks | None = None  # of all graphs of this process; made when a state wants scalars


def reduction_begins(gradients: Sequence[Gradient]) -> tf.Tensor | None:
    """Return the time at which this rank's gradients are computed; None if nothing is measured."""
    return None if _marks is None or xla_compiles() else _time_after(gradients)


def reduction_ends(began: tf.Tensor | None, gradients: list[Gradient]) -> list[Gradient]:
    """Take the time and the norm of the averaged gradients, and return the gradients."""
    if began is not None and _marks is not None:
        with tf.device("CPU:0"):
            _marks.waited.assign_add(_time_after(gradients) - began)
            _marks.averaged.assign(_norm(gradients))
            _marks.steps.assign_add(1)
    return gradients


def watch(scalars: Scalars) -> None:
    """Report steps to the rank's scalars whenever they ask for them."""
    global _marks
    marks = _marks = _marks or _Marks()
    steps, waited = int(marks.steps), float(marks.waited)

    def poll() -> None:
        nonlocal steps, waited
        steps_before, steps = steps, int(marks.steps)
        if steps != steps_before:
            waited_before, waited = waited, float(marks.waited)
            scalars.waited(waited - waited_before)
            scalars.stepped({"norm/averaged_gradient": float(marks.averaged)}, steps - steps_before)

    scalars.poll = poll


def _time_after(values: Any) -> tf.Tensor:
    """Return the time when values are computed, in seconds since the Unix epoch: float64."""
    flat = [each for each in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(each)]
    with tf.control_dependencies([] if tf.executing_eagerly() else flat), tf.device("CPU:0"):
        return tf.timestamp()


def _norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Return the Euclidean norm of gradients together: float64. Slices of one place are added up."""
    dense = []
    for each in gradients:
        if isinstance(each, tf.IndexedSlices):
            places, numbers = tf.unique(each.indices)
            each = tf.math.unsorted_segment_sum(each.values, numbers, tf.size(places))
        if each is not None:
            dense.append(tf.cast(each, tf.float32))
    return tf.cast(tf.linalg.global_norm(dense), tf.float64)
