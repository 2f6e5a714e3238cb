"""Observers that the environment asks for, such as the witness of a drill; none is known here by name."""

from __future__ import annotations

from importlib import import_module

from hvdrecover.elastic.companions import Observer
from hvdrecover.elastic.context import Context


def observers(context: Context) -> tuple[Observer, ...]:
    """Return the observers of a state.

    Args:
        context: the state's surroundings.
    """
    if context.config.instruments is None:
        return ()
    found: tuple[Observer, ...] = import_module(context.config.instruments).observers(context)
    return found
