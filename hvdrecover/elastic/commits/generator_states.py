"""States of random generators that come from a commit: looked at before they are set.

numpy does not look: a place beyond the end of a generator's buffer is read all the same, and the process
dies of it.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

_ENDS = {("MT19937", "pos"): 624, ("Philox", "buffer_pos"): 4}  # the last place in a generator's buffer


def python() -> Any:
    """The state of Python's global generator, its 625 words as an array: JSON takes it at every commit."""
    version, words, gauss = random.getstate()
    return version, np.array(words, dtype=np.uint32), gauss


def set_python(state: Any) -> None:
    """Set Python's global generator.

    Args:
        state: what `python` or ``random.getstate()`` gave.

    Raises:
        ValueError: this is not a state of it.
    """
    try:
        if state[2] is not None and type(state[2]) is not float:  # the other half of a pair of gauss()
            raise ValueError(f"Python's generator has no such state: {state[2]!r}")
        words = state[1].tolist() if isinstance(state[1], np.ndarray) else state[1]
        random.setstate((state[0], tuple(words), state[2]))
    except (TypeError, OverflowError, LookupError) as error:
        raise ValueError(f"Python's generator has no such state: {error}") from error


def set_numpy(state: Any) -> None:
    """Set numpy's global generator.

    Args:
        state: what ``numpy.random.get_state(legacy=False)`` gave, of a generator of the present kind.

    Raises:
        ValueError: this is not a state of it.
    """
    present = np.random.get_state(legacy=False)
    if not _is_like(state, present) or state["bit_generator"] != present["bit_generator"]:
        raise ValueError(f"numpy's generator, {present['bit_generator']}, has no such state")
    for (kind, field), end in _ENDS.items():
        holder = {**state, **state["state"]}
        if state["bit_generator"] == kind and not 0 <= holder[field] <= end:
            raise ValueError(f"numpy's generator has no place {holder[field]}")
    try:
        np.random.set_state(state)
    except (TypeError, OverflowError, KeyError) as error:
        raise ValueError(f"numpy's generator has no such state: {error}") from error


def _is_like(value: Any, other: Any) -> bool:
    """Return whether both have the same containers, types, dtypes and shapes."""
    if isinstance(other, dict):
        same = isinstance(value, dict) and value.keys() == other.keys()
        return same and all(_is_like(value[key], other[key]) for key in other)
    if isinstance(other, np.ndarray):
        return isinstance(value, np.ndarray) and (value.dtype, value.shape) == (other.dtype, other.shape)
    return type(value) is type(other)
