"""The state of a torch training job."""

from __future__ import annotations

from typing import Any

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.elastic.commits.randomness import Randomness
from hvdrecover.elastic.guard.settings import Guard
from hvdrecover.elastic.state import State
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.scalars import require_tensorboard
from hvdrecover.torch.world import TorchWorld


class TorchState(State):
    """A `State` of torch modules, optimizers, schedulers, samplers and plain objects.

    Args:
        model: a module, or None.
        optimizer: an optimizer, wrapped by ``hvd.DistributedOptimizer`` or not, or None.
        checkpoint: a `Checkpoint` or its URL; None takes ``HVDRECOVER_CHECKPOINT``, and without that nothing
            is written.
        rng: ``"reseed"``, the default, or ``"store"``; see `hvdrecover.elastic.commits.randomness`.
        guard: what is watched about the ranks, such as ``Guard()``; None watches nothing.
        tensorboard: path or URL of a folder for TensorBoard's runs, one for each rank; None writes none.
        attributes: more modules, optimizers, samplers and anything else to track, by name.

    Raises:
        ConfigError: a setting has no usable value, or an attribute's name is taken.
        UnsupportedValueError: a plain object that JSON can't hold.
        UnsupportedTensorError: a tensor that safetensors can't hold.
    """

    def __init__(
        self,
        model: Any = None,
        optimizer: Any = None,
        *,
        checkpoint: Checkpoint | str | None = None,
        rng: Randomness | None = None,
        guard: Guard | None = None,
        tensorboard: str | None = None,
        **attributes: Any,
    ) -> None:
        if tensorboard is not None:
            require_tensorboard()
        super().__init__(
            TorchFramework(),
            TorchWorld(),
            checkpoint=checkpoint,
            rng=rng,
            guard=guard,
            tensorboard=tensorboard,
            attributes={"model": model, "optimizer": optimizer, **attributes},
        )
