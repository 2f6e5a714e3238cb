"""The limit of collectives that wait for a silent rank.

A rank that hangs is killed by its guardian; the others must have left their collectives by then, or they
would be taken for hanging as well. So waiting is limited, but only while nobody is known to be at something
long: not before the job's first commit, not in a recovery, and not in a pause.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdrecover import heartbeat
from hvdrecover.elastic.interfaces import World

_world: World | None = None
_allowed = 0


def follow(world: World) -> None:
    """Limit waiting as this process's page says; cheap if nothing has changed."""
    global _world, _allowed
    _world = world
    if heartbeat.watched() and (seconds := heartbeat.stall_seconds()) != _allowed:
        world.allow_stalls(seconds)
        _allowed = seconds


def allowed() -> int:
    """Return how many seconds collectives of this process may wait for a rank; 0 for ever, or if unknown."""
    return _allowed


def forget() -> None:
    """Horovod has been initialised anew, and waits without limit."""
    global _allowed
    _allowed = 0


@contextmanager
def paused() -> Iterator[None]:
    """Cover a phase that may take as long as it likes without a sign of progress, such as an evaluation.

    All ranks must enter it, also those that have nothing to do in it: they wait for the others afterwards,
    which nobody holds against them until there is progress again.

    Examples:
        >>> with recover.paused():
        ...     evaluated = sum(range(1000))  # something long
    """
    with heartbeat.paused():
        if _world is not None:
            follow(_world)
        yield
    heartbeat.at_progress(_follow)


def _follow() -> None:
    if _world is not None:
        follow(_world)
