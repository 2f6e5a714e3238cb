"""Old names, which work in this version."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn(old: str, new: str, *, frames: int) -> None:
    """Say what something is called now.

    Args:
        old: the name by which it was called.
        new: the name to use.
        frames: how many functions of ours are between this one and who has called it so.
    """
    message = f"{old} is called {new} now; the next version drops the old name"
    warnings.warn(message, DeprecationWarning, stacklevel=2 + frames)


def method(old: str, new: str, function: Callable[P, R]) -> Callable[P, R]:
    """Return a method under its old name, which says the new one when it is called."""

    @functools.wraps(function)
    def renamed(*positional: P.args, **named: P.kwargs) -> R:
        warn(old, new, frames=1)
        return function(*positional, **named)

    return renamed
