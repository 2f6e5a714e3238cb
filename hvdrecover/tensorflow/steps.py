"""Marks of the parts of a training step, norms of its gradients and its loss, as they come by inside graphs.

Graphs leave them in variables, which cost next to nothing and which nobody waits for. A step is one
reduction of gradients.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from hvdrecover.elastic.scalars.scalars import Scalars
from hvdrecover.tensorflow import xla
from hvdrecover.tensorflow.own_gradients import Gradient
from hvdrecover.tensorflow.variables import counter

_WATCHED = "_hvdrecover_watched"  # of a model: whether its training step is


class Marks:
    """The marks that graphs have left; all times are in seconds.

    Attributes:
        steps: how many reductions there were.
        batches: how many batches have come to the training step of a model.
        waited: for gradients of other ranks, in all.
        waited_for_data: for these batches, in all.
        since: from when the next one is waited for, since the Unix epoch.
        own: norm of this rank's last gradients.
        averaged: norm of what all ranks have made of them.
        loss: the last one of the model.
    """

    def __init__(self) -> None:
        self.steps, self.batches = counter(), counter()
        self.waited, self.waited_for_data, self.since = (counter(tf.float64) for _ in range(3))
        self.own, self.averaged, self.loss = (counter(tf.float64) for _ in range(3))


_marks: Marks | None = None  # of all graphs of this process, once anybody looks


class Reducing:
    """The reduction of gradients, if anybody looks; made when it begins.

    Args:
        gradients: this rank's; None where there is none.
    """

    def __init__(self, gradients: Sequence[Gradient]) -> None:
        self._marks = None if xla.compiles() else _marks
        if self._marks is not None:
            self._own = _norm(gradients)
            self._began = _time_after(gradients)

    def done(self, gradients: list[Gradient]) -> list[Gradient]:
        """The reduced gradients, which are handed through."""
        marks = self._marks
        if marks is not None:
            with tf.device("CPU:0"):
                marks.waited.assign_add(_time_after(gradients) - self._began)
                marks.own.assign(self._own)
                marks.averaged.assign(_norm(gradients))
                marks.steps.assign_add(1)
        return gradients


class Steps:
    """Tells of steps that have ended.

    Args:
        scalars: are told.
    """

    def __init__(self, scalars: Scalars) -> None:
        global _marks
        self._marks = _marks = _marks or Marks()
        self._scalars = scalars
        self._steps, self._batches = int(_marks.steps), int(_marks.batches)
        self._waited, self._for_data = float(_marks.waited), float(_marks.waited_for_data)
        scalars.poll = self.poll

    def poll(self) -> None:
        """See whether steps have ended."""
        marks, before = self._marks, self._steps
        self._steps = int(marks.steps)
        if self._steps == before:
            return
        waited, self._waited = self._waited, float(marks.waited)
        self._scalars.waited(self._waited - waited)
        batches, self._batches = self._batches, int(marks.batches)
        if self._batches != batches:
            for_data, self._for_data = self._for_data, float(marks.waited_for_data)
            self._scalars.waited_for_data(self._for_data - for_data)
        norms = {"norm/own_gradient": float(marks.own), "norm/averaged_gradient": float(marks.averaged)}
        self._scalars.measured(norms)
        self._scalars.stepped(self._steps - before)

    def timed(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """An iterator that tells when a loop in Python has got a batch, itself."""
        iterator.__class__ = _Timed
        iterator._hvdrecover_steps = self  # type: ignore[attr-defined]
        return iterator

    def fetched(self) -> None:
        """The batch is there."""
        self._scalars.fetched()

    def batch_begins(self) -> None:
        """``model.fit`` begins a batch."""
        self._marks.since.assign(time.time())

    def loss(self) -> float:
        """Of the model's last batch."""
        return float(self._marks.loss)

    def watch(self, model: keras.Model) -> None:
        """Have a model's training step leave marks; before ``fit`` makes its training function."""
        if getattr(model, _WATCHED, False):
            return
        setattr(model, _WATCHED, True)
        _leave_marks(model, self._marks)
        model.train_function = None  # what was traced before leaves none


class _Timed(OwnedIterator):  # type: ignore[misc]
    """The class that an iterator is given."""

    _hvdrecover_steps: Steps

    def __next__(self) -> Any:
        self._hvdrecover_steps.poll()
        batch = super().__next__()
        self._hvdrecover_steps.fetched()
        return batch


def _leave_marks(model: keras.Model, marks: Marks) -> None:
    train_step, compute_loss = model.train_step, model.compute_loss
    training = False

    @functools.wraps(train_step)
    def marked_step(data: Any) -> Any:
        nonlocal training
        with tf.device("CPU:0"):
            wait = tf.maximum(_time_after(data) - marks.since, 0.0)
            marks.waited_for_data.assign_add(wait)
            marks.batches.assign_add(1)
        training = True
        try:
            results = train_step(data)
        finally:
            training = False
        with tf.device("CPU:0"):
            marks.since.assign(_time_after(results))
        return results

    @functools.wraps(compute_loss)
    def marked_loss(*args: Any, **options: Any) -> Any:
        loss = compute_loss(*args, **options)
        if training:  # and not evaluating
            marks.loss.assign(tf.cast(loss, tf.float64))
        return loss

    model.train_step, model.compute_loss = marked_step, marked_loss


def _time_after(values: Any) -> tf.Tensor:
    """The time when values are there, in seconds since the Unix epoch: float64."""
    flat = [each for each in tf.nest.flatten(values, expand_composites=True) if tf.is_tensor(each)]
    with tf.control_dependencies([] if tf.executing_eagerly() else flat), tf.device("CPU:0"):
        return tf.timestamp()


def _norm(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Float64."""
    dense = [_summed(each) for each in gradients if each is not None]
    return tf.cast(tf.linalg.global_norm([tf.cast(each, tf.float32) for each in dense]), tf.float64)


def _summed(gradient: Gradient) -> tf.Tensor:
    """All numbers that are not zero; slices of one place are added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    places, numbers = tf.unique(gradient.indices)
    return tf.math.unsorted_segment_sum(gradient.values, numbers, tf.size(places))
