"""A note of whether gradients were finite on this rank, before they were averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdrecover.tensorflow.finite import each_finite
from hvdrecover.tensorflow.variables import Variable, raw

_ATTRIBUTE = "_hvdrecover_own_gradients"  # of a graph

Gradient = Any
"""A ``tf.Tensor``, ``tf.IndexedSlices`` or None."""


class Own:
    """The notes of whether gradients were finite on this rank; of the last ones of each graph.

    Attributes:
        wanted: whether anybody wants to know.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._eager = _Noted([], None)

    def note(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Remember gradients that are about to be averaged, if anybody wants to know."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if not self.wanted or not places:
            return
        finite = each_finite([values(gradients[place]) for place in places])
        noted = _Noted([id(raw(variables[place])) for place in places], finite)
        if tf.inside_function():
            setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, noted)  # and goes with it
        else:
            self._eager = noted

    def found(self, finite: tf.Tensor, variables: Sequence[Variable]) -> None:
        """Remember which gradients of variables were finite, outside of graphs: bool, one for each."""
        self._eager = _Noted([id(raw(variable)) for variable in variables], finite)

    def of(self, variables: Sequence[Variable]) -> tf.Tensor | None:
        """Bool of shape ``[len(variables)]``; None if these were not averaged last."""
        noted = self._eager
        if tf.inside_function():
            noted = getattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, _Noted([], None))
        wanted = [id(raw(variable)) for variable in variables]
        if wanted == noted.keys:
            return noted.finite
        places = {key: place for place, key in enumerate(noted.keys)}
        if noted.finite is None or not places.keys() >= set(wanted):
            return None
        return tf.gather(noted.finite, [places[key] for key in wanted])


@dataclass(frozen=True)
class _Noted:
    """Of which variables, by identity, gradients were noted, and which were; bool of the same length."""

    keys: list[int]
    finite: tf.Tensor | None


own = Own()


def values(gradient: Gradient) -> tf.Tensor:
    """Return what numbers a gradient holds; of a sparse one those that are not zero."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
