"""Instruments that the environment asks for, such as those of a drill; none is known here by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from hvdrecover.config import Config

if TYPE_CHECKING:  # the guardian and the launcher start instruments too, and must not load numpy for them
    from hvdrecover.elastic.companions import Observer
    from hvdrecover.elastic.context import Context


def start(config: Config, kind: str) -> None:
    """Start the instruments of this process.

    Args:
        config: the process's settings, which name the module.
        kind: what the process does; one word.
    """
    if config.instruments is not None:
        import_module(config.instruments).start(config, kind)


def observers(context: Context) -> tuple[Observer, ...]:
    """Return the observers of a state.

    Args:
        context: the state's surroundings.
    """
    if context.config.instruments is None:
        return ()
    found: tuple[Observer, ...] = import_module(context.config.instruments).observers(context)
    return found
