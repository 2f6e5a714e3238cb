"""Times of training steps, norms of their gradients and the loss of ``model.fit``, as graphs compute them.

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
from hvdrecover.tensorflow import xla
from hvdrecover.tensorflow.own_gradients import Gradient
from hvdrecover.tensorflow.variables import counter

_WATCHED = "_hvdrecover_watched"  # attribute of a model whose loss is watched


class Marks:
    """The numbers that graphs leave.

    Attributes:
        steps: number of reductions.
        waited: seconds spent in waiting for gradients of other ranks, in all.
        averaged: norm of the last averaged gradients.
        loss: the last loss of the model.
    """

    def __init__(self) -> None:
        self.steps = counter()
        self.waited, self.averaged, self.loss = (counter(tf.float64) for _ in range(3))


_marks: Marks | None = None  # of all graphs of this process; made when a state wants scalars


class Reducing:
    """One reduction of gradients; create it when the reduction begins.

    Args:
        gradients: this rank's gradients; None where a variable has none.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._marks = None if xla.compiles() else _marks
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
    """Reports steps that have ended to the scalars.

    Args:
        scalars: the rank's scalars.
    """

    def __init__(self, scalars: Scalars) -> None:
        global _marks
        self._marks = _marks = _marks or Marks()
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
        if not getattr(model, _WATCHED, False):
            setattr(model, _WATCHED, True)
            _leave_loss(model, self._marks)
            model.train_function = None  # a function that was traced before leaves no loss


def _leave_loss(model: keras.Model, marks: Marks) -> None:
    train_step, compute_loss = model.train_step, model.compute_loss
    training = False  # and not evaluating

    @functools.wraps(train_step)
    def marked_step(data: Any) -> Any:
        nonlocal training
        training = True
        try:
            return train_step(data)
        finally:
            training = False

    @functools.wraps(compute_loss)
    def marked_loss(*args: Any, **options: Any) -> Any:
        loss = compute_loss(*args, **options)
        if training:
            with tf.device("CPU:0"):
                marks.loss.assign(tf.cast(loss, tf.float64))
        return loss

    model.train_step, model.compute_loss = marked_step, marked_loss


def _time_after(values: Any) -> tf.Tensor:
    """Return the time when values are computed, in seconds since the Unix epoch: float64."""
    flat = [each for each in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(each)]
    with tf.control_dependencies([] if tf.executing_eagerly() else flat), tf.device("CPU:0"):
        return tf.timestamp()


def _norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Return the Euclidean norm of gradients together: float64."""
    dense = [_summed(each) for each in gradients if each is not None]
    return tf.cast(tf.linalg.global_norm([tf.cast(each, tf.float32) for each in dense]), tf.float64)


def _summed(gradient: Gradient) -> tf.Tensor:
    """Return all numbers of a gradient that are not zero; slices of one place are added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    places, numbers = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, numbers, tf.size(places))
