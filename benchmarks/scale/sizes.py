"""The figures of states of few bytes and many."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.rows import Found
from benchmarks.scale import states
from benchmarks.states import Setting, Shape

_LAYERS = {"full": 20, "small": 2}
_WIDTHS = {"full": (645, 2048, 2896, 4096, 5792), "small": (64,)}  # 0.1, 1, 2, 4 and 8 GB


def measure(setting: Setting) -> Sequence[Found]:
    """States of 160 tensors."""
    shapes = [Shape(_LAYERS[setting.size], width) for width in _WIDTHS[setting.size]]
    sizes = {round(shape.nbytes / 1e9, 6): shape for shape in shapes}
    return states.curves("sizes", "GB", sizes, setting.rounds(3), setting.folder)
