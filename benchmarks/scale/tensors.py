"""The figures of states of few tensors and many."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Found
from benchmarks.scale import states
from benchmarks.states import Setting, Shape

_SHAPES = {  # of 0.1 GB at full size
    "full": (Shape(20, 645), Shape(250, 182), Shape(2500, 57)),
    "small": (Shape(2, 64),),
}


def measure(setting: Setting) -> Sequence[Found]:
    """States of 0.1 GB."""
    shapes = {float(shape.tensors): shape for shape in _SHAPES[setting.size]}
    return states.curves("tensors", "tensors", shapes, setting.rounds(3), setting.folder)
