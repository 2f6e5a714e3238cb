"""The states of ``horovod.torch.elastic``, for scripts that have changed nothing but the import."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic.state as _hvd

from hvdrecover.stand_in import standing_in
from hvdrecover.state import state as states
from hvdrecover.state.rank_local import Randomness
from hvdrecover.torch import state
from hvdrecover.torch.framework import TorchFramework, TorchWorld

__getattr__, __dir__ = standing_in(_hvd, globals())


def _parts() -> tuple[TorchFramework, TorchWorld]:
    return TorchFramework(), TorchWorld()


class State(states.HorovodState):
    _parts = staticmethod(_parts)


class ObjectState(states.ObjectState):
    _parts = staticmethod(_parts)


class TorchState(state.TorchState):
    """`hvdrecover.torch.TorchState`, but that it leaves random generators alone."""

    # A script that was not written for us may draw the same numbers on all ranks from a global generator.
    _rng: Randomness = "store"

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any) -> None:
        super().__init__(model, optimizer, **attributes)
        self._bcast_object, self._rank = states.from_root(self, hvd.broadcast_object), hvd.rank
