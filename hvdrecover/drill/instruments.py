"""A drill's instruments in the processes of a run; loaded by name, so that nothing below knows of drills."""

from __future__ import annotations

from hvdrecover.config import Config
from hvdrecover.drill import temporary_files
from hvdrecover.drill.witness import Witness
from hvdrecover.elastic.companions import Observer
from hvdrecover.elastic.context import Context


def start(config: Config, kind: str) -> None:
    """Watch what temporary files this process makes.

    Args:
        config: the process's settings.
        kind: what the process does; one word.
    """
    temporary_files.watch(config, kind)


def observers(context: Context) -> tuple[Observer, ...]:
    """Return the witness of a state.

    Args:
        context: the state's surroundings.
    """
    start(context.config, "training")
    return (Witness(context),)
