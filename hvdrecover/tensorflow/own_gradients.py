"""A note of whether gradients were finite on this rank, before they were averaged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdrecover.tensorflow.variables import Variable, raw

_ATTRIBUTE = "_hvdrecover_own_gradients"  # of a graph

Gradient = Any
"""A ``tf.Tensor``, ``tf.IndexedSlices`` or None."""


@dataclass(frozen=True)
class _Noted:
    """The sums of gradients, and the identities of their variables."""

    keys: list[int]
    sums: tf.Tensor | None


class Own:
    """The notes about gradients of this rank; the last ones of each graph.

    Attributes:
        wanted: whether a guard looks at gradients.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._eager = _Noted([], None)

    def note(self, gradients: Sequence[Gradient], variables: Sequence[Variable]) -> None:
        """Remember gradients that are about to be averaged, if a guard looks at them."""
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        if not self.wanted or not places:
            return
        noted = _Noted(
            [id(raw(variables[place])) for place in places],
            sums([values(gradients[place]) for place in places]),
        )
        if tf.inside_function():
            setattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, noted)  # and goes with it
        else:
            self._eager = noted

    def found(self, found: tf.Tensor, variables: Sequence[Variable]) -> None:
        """Remember the `sums` of variables' gradients, outside of graphs."""
        self._eager = _Noted([id(raw(variable)) for variable in variables], found)

    def of(self, variables: Sequence[Variable]) -> tf.Tensor | None:
        """Return the `sums` of variables' gradients; None if these were not averaged last."""
        noted = self._eager
        if tf.inside_function():
            noted = getattr(tf.compat.v1.get_default_graph(), _ATTRIBUTE, _Noted([], None))
        wanted = [id(raw(variable)) for variable in variables]
        if wanted == noted.keys:
            return noted.sums
        places = {key: place for place, key in enumerate(noted.keys)}
        if noted.sums is None or not places.keys() >= set(wanted):
            return None
        return tf.gather(noted.sums, [places[key] for key in wanted])


own = Own()


def values(gradient: Gradient) -> tf.Tensor:
    """The numbers of a gradient; of a sparse one those that are not zero."""
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def sums(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The sum of each tensor: float32 of shape ``[len(tensors)]``.

    A sum is not finite if one of its terms is not, or if they are large: so look closer at one that is not.
    """
    real = [tf.abs(each) if each.dtype.is_complex else each for each in tensors]
    wide = [tf.cast(each, tf.float32) if each.dtype.size < 4 else each for each in real]
    return tf.stack([tf.cast(tf.reduce_sum(each), tf.float32) for each in wide])
