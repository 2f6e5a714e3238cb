"""A replacement for ``horovod.tensorflow.elastic``, with our states and training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import horovod.tensorflow.elastic as _hvd
import keras

from hvdrecover.errors import ConfigError
from hvdrecover.stand_in import standing_in
from hvdrecover.state import state as states
from hvdrecover.state.rank_local import Randomness
from hvdrecover.state.run import run
from hvdrecover.tensorflow import state
from hvdrecover.tensorflow.collectives import TensorFlowWorld
from hvdrecover.tensorflow.framework import TensorFlowFramework
from hvdrecover.tensorflow.variables import Variable

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

__getattr__, __dir__ = standing_in(_hvd, globals())


def _parts() -> tuple[TensorFlowFramework, TensorFlowWorld]:
    return TensorFlowFramework(), TensorFlowWorld()


class State(states.HorovodState):
    _parts = staticmethod(_parts)


class ObjectState(states.ObjectState):
    _parts = staticmethod(_parts)


class TensorFlowState(state.TensorFlowState):
    """`hvdrecover.tensorflow.TensorFlowState`, but that it leaves random generators alone."""

    # A script that was not written for hvdrecover may need the same global random numbers on all ranks.
    _rng: Randomness = "store"

    def __init__(
        self, variables: Sequence[Variable] | None = None, session: Any = None, **attributes: Any
    ) -> None:
        if session is not None:
            raise ConfigError(
                "session",
                "variables of a session of TensorFlow 1 can't be kept; pass variables=[...] of TensorFlow 2",
            )
        super().__init__(variables, **attributes)
        self._bcast_object, self._rank = states.from_root(self, hvd.broadcast_object), hvd.rank


class TensorFlowKerasState(state.TensorFlowKerasState):
    """`hvdrecover.tensorflow.TensorFlowKerasState`, but that it leaves random generators alone.

    Horovod takes ``backend`` for TensorFlow 1; it is not used.
    """

    _rng: Randomness = "store"

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None = None,
        backend: Any = None,
        **attributes: Any,
    ) -> None:
        super().__init__(model, optimizer, **attributes)
        self._bcast_object, self._rank = states.from_root(self, hvd.broadcast_object), hvd.rank
