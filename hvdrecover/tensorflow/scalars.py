"""The scalars of a state: times of training steps, norms of gradients, and the loss of ``model.fit``.

Graphs leave these numbers in variables: that costs next to nothing, and no rank waits for them. Python reads
the variables when it next passes. One reduction of gradients is one step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdrecover.scalars import Scalars
from hvdrecover.tensorflow.collectives import counter, xla_compiles
from hvdrecover.tensorflow.variables import Gradient

_WATCHED = "_hvdrecover_watched"  # attribute of a model whose loss is watched


class _Marks:
    """The variables in which graphs leave numbers."""

    def __init__(self) -> None:
        self.steps = counter()  # number of reductions
        self.waited = counter(tf.float64)  # seconds of waiting for gradients of other ranks, in all
        self.averaged = counter(tf.float64)  # norm of the last averaged gradients
        self.loss = counter(tf.float64)  # the last loss of the model


_marks: _Marks | None = None  # of all graphs of this process; made when a state wants scalars


class Reducing:
    """Measures one reduction of this rank's gradients; create it when the reduction begins."""

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._marks = None if xla_compiles() else _marks
        if self._marks is not None:
            self._began = _time_after(gradients)

    def done(self, gradients: list[Gradient]) -> list[Gradient]:
        """Take the time and the norm of the averaged gradients, and return the gradients."""
        marks = self._marks
        if marks is not None:
            with tf.device("CPU:0"):
                marks.waited.assign_add(_time_after(gradients) - self._began)
                marks.averaged.assign(_norm(gradients))
                marks.steps.assign_add(1)
        return gradients


class Steps:
    """Reports steps that have ended to the rank's scalars."""

    def __init__(self, scalars: Scalars) -> None:
        global _marks
        self._marks = _marks = _marks or _Marks()
        self._scalars = scalars
        self._steps, self._waited = int(_marks.steps), float(_marks.waited)
        scalars.poll = self.poll

    def poll(self) -> None:
        """Report the steps that have ended since the last call."""
        before, self._steps = self._steps, int(self._marks.steps)
        if self._steps != before:
            waited, self._waited = self._waited, float(self._marks.waited)
            self._scalars.waited(self._waited - waited)
            norm = float(self._marks.averaged)
            self._scalars.stepped({"norm/averaged_gradient": norm}, self._steps - before)

    def loss(self) -> float:
        """Return the loss of the model's last batch."""
        return float(self._marks.loss)

    def watch(self, model: keras.Model) -> None:
        """Have a model's training step leave its loss, before ``fit`` makes its training function."""
        if getattr(model, _WATCHED, False):
            return
        setattr(model, _WATCHED, True)
        train_step, compute_loss, marks = model.train_step, model.compute_loss, self._marks
        trains = False  # and does not evaluate

        @functools.wraps(train_step)
        def marked_step(data: Any) -> Any:
            nonlocal trains
            trains = True
            try:
                return train_step(data)
            finally:
                trains = False

        @functools.wraps(compute_loss)
        def marked_loss(*args: Any, **options: Any) -> Any:
            loss = compute_loss(*args, **options)
            if trains:
                with tf.device("CPU:0"):
                    marks.loss.assign(tf.cast(loss, tf.float64))
            return loss

        model.train_step, model.compute_loss = marked_step, marked_loss
        model.train_function = None  # a function that was traced before leaves no loss


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
