"""Horovod's classes of states, for scripts that have changed nothing but the import; for all frameworks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from hvdrecover import config as configs
from hvdrecover.state import state as states
from hvdrecover.state.adapter import Framework, World
from hvdrecover.state.random import Randomness

Broadcast = Callable[..., Any]


class ObjectState(states.State):
    """Horovod's ``ObjectState``: a state of plain objects, and of all else that the framework knows.

    Random generators are left alone: a script that was not written for us may draw the same numbers on all
    ranks from a global one. Subclasses find the arguments as ``self._bcast_object`` and ``self._rank``.
    """

    _rng: Randomness = "store"

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int], **attributes: Any) -> None:
        super().__init__(*self._parts(), attributes=attributes)
        self._bcast_object, self._rank = from_root(self, bcast_object), get_rank

    @staticmethod
    def _parts() -> tuple[Framework, World]:
        raise NotImplementedError


class State(states.State):
    """Horovod's ``State``, the base of states whose `save`, `restore` and `sync` do everything themselves.

    They are called where Horovod would call them, and ranks leave, join and restart as with any state. What
    they keep is in memory only: no commit becomes durable.
    """

    _rng: Randomness = "store"

    def __init__(self, bcast_object: Broadcast, get_rank: Callable[[], int]) -> None:
        config = configs.read()
        super().__init__(*self._parts(), config=dataclasses.replace(config, checkpoint=None), attributes={})
        self._url = config.checkpoint
        self._bcast_object, self._rank = from_root(self, bcast_object), get_rank

    @staticmethod
    def _parts() -> tuple[Framework, World]:
        raise NotImplementedError

    def _not_durable(self) -> str | None:
        return self._url and (
            f"{type(self).__name__} keeps its commits by itself, in memory: none becomes durable at "
            f"{self._url}; derive it from ObjectState, and pass what is to be kept to the constructor by name"
        )


def from_root(state: states.State, bcast_object: Broadcast) -> Broadcast:
    """Return a ``broadcast_object`` whose default root is the rank whose state all have taken."""
    if "root_rank" not in inspect.signature(bcast_object).parameters:
        return bcast_object

    def broadcast(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 2:
            kwargs.setdefault("root_rank", state._session.root)
        return bcast_object(*args, **kwargs)

    return broadcast
