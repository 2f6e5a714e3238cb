"""Gradients as they were on this rank, before they were averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdrecover.tensorflow.variables import Variable, raw

_ATTRIBUTE = "_hvdrecover_own_gradients"  # of a graph

Gradient = Any
"""A ``tf.Tensor``, ``tf.IndexedSlices`` or None."""


class Own:
    """Gradients as they were on this rank before they were averaged; the last ones of each graph.

    They are there as long as an optimizer may ask for them, which costs nothing as long as none does: Horovod
    writes averages into memory of their own.

    Attributes:
        wanted: whether anybody wants to know.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._eager: dict[int, Gradient] = {}

    def note(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Remember gradients that are about to be averaged, if anybody wants to know."""
        noted = {
            id(raw(variable)): gradient
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
        }
        if not self.wanted or not noted:
            return
        if tf.inside_function():
            setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, noted)  # and goes with it
        else:
            self._eager = noted

    def take(self, variables: Sequence[Variable]) -> list[Gradient] | None:
        """The gradients of variables, for what applies them; None if these were not averaged last."""
        keys = [id(raw(variable)) for variable in variables]
        if tf.inside_function():
            noted = getattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, {})
            return [noted[key] for key in keys] if all(key in noted for key in keys) else None
        if not all(key in self._eager for key in keys):
            return None
        return [self._eager.pop(key) for key in keys]  # they take up memory


own = Own()


def values(gradient: Gradient) -> tf.Tensor:
    """What numbers a gradient holds; of a sparse one those that are not zero."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
