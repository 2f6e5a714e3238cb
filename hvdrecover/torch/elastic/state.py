"""The states of ``horovod.torch.elastic``, for scripts that have changed nothing but the import."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import horovod.torch.elastic.state as _hvd

from hvdrecover.errors import ConfigError
from hvdrecover.stand_in import standing_in
from hvdrecover.state import drop_in
from hvdrecover.state.random import Randomness
from hvdrecover.torch import state
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.world import TorchWorld

_HOROVODS_HANDLERS = (_hvd.ModelStateHandler, _hvd.OptimizerStateHandler, _hvd.SamplerStateHandler)

__getattr__, __dir__ = standing_in(_hvd, globals())


def _parts() -> tuple[TorchFramework, TorchWorld]:
    return TorchFramework(), TorchWorld()


class State(drop_in.State):
    """See `hvdrecover.state.drop_in.State`."""

    _parts = staticmethod(_parts)


class ObjectState(drop_in.ObjectState):
    """See `hvdrecover.state.drop_in.ObjectState`."""

    _parts = staticmethod(_parts)


class TorchState(state.TorchState):
    """`hvdrecover.torch.TorchState`, but that it leaves random generators alone.

    A script that was not written for us may draw the same numbers on all ranks from a global generator.

    A value for whose type the script has registered a handler (``set_handler_registry``) is kept by that, in
    memory, where Horovod would have it do so.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped by ``hvd.DistributedOptimizer`` or not, or None.
        attributes: what else to track, by name; and the keywords of `hvdrecover.torch.TorchState`.

    Raises:
        ConfigError: as for `hvdrecover.torch.TorchState`; or a value has a handler, and there is a
            checkpoint root.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.
    """

    _rng: Randomness = "store"

    def __init__(self, model: Any = None, optimizer: Any = None, **attributes: Any) -> None:
        attributes = {"model": model, "optimizer": optimizer, **attributes}
        self._handlers = {
            name: handler for name, value in attributes.items() if (handler := _handler(value)) is not None
        }
        super().__init__(**{name: value for name, value in attributes.items() if name not in self._handlers})
        self._bcast_object, self._rank = drop_in.from_root(self, hvd.broadcast_object), hvd.rank
        for name, handler in self._handlers.items():
            self._refuse_durable(name, handler)
            object.__setattr__(self, name, handler.value)

    def save(self) -> None:
        """Make a commit in this rank's memory only, without a word to the others."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Return to the newest commit in this rank's memory."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Bring all ranks to one commit."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        if (handler := self.__dict__.get("_handlers", {}).get(name)) is not None:
            handler.set_value(value)
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _refuse_durable(self, name: str, handler: Any) -> None:
        if self._session.durable.wanted:
            kind = type(handler.value).__name__
            raise ConfigError(
                f"state.{name}",
                f"its handler, {type(handler).__name__}, keeps a {kind} in memory only, and commits are to "
                f"be durable; give {kind} state_dict() and load_state_dict(), and register no handler",
            )


def _handler(value: Any) -> Any:
    """Return a value's handler, if the first that is registered for it is one of the script's."""
    kinds = (handler for kind, handler in _hvd.get_handler_registry() if isinstance(value, kind))
    kind = next(kinds, _HOROVODS_HANDLERS[0])
    return None if kind in _HOROVODS_HANDLERS else kind(value)
