"""Times of training steps and norms of their gradients, by hooks on optimizers.

A step ends when the first optimizer of the state has stepped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdrecover.elastic.scalars.scalars import Scalars
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.stepping import stepping

_WIDE = (torch.float32, torch.float64)


def watch(components: Mapping[str, Any], scalars: Scalars) -> None:
    """Report the steps of optimizers to the scalars.

    Args:
        components: by attribute name.
        scalars: the rank's scalars.
    """
    optimizers = {name: each for name, each in components.items() if isinstance(each, torch.optim.Optimizer)}
    values: dict[str, torch.Tensor] = {}  # of the step under way
    for number, (name, optimizer) in enumerate(optimizers.items()):
        tag = "norm/averaged_gradient" + (f"/{name}" if len(optimizers) > 1 else "")
        _Steps(optimizer, scalars, tag, values, counts=number == 0)


class _Steps:
    """Watches one optimizer.

    Args:
        optimizer: wrapped by ``hvd.DistributedOptimizer`` or not.
        scalars: the rank's scalars.
        tag: name of the norm of this optimizer's gradients.
        values: takes the norm.
        counts: whether this optimizer's steps are those of the job.
    """

    def __init__(
        self, optimizer: Any, scalars: Scalars, tag: str, values: dict[str, torch.Tensor], *, counts: bool
    ) -> None:
        self._optimizer = optimizer
        self._scalars = scalars
        self._tag = tag
        self._values = values
        steps = stepping(optimizer)
        steps.begins.append(self._begins)
        steps.averaging.append(scalars.waiting)
        # A plain optimizer averages nothing: its gradients are those that it applies.
        (steps.averaged if hasattr(optimizer, "synchronize") else steps.applying).append(self._averaged)
        if counts:
            steps.ended.append(self._ended)

    def _begins(self) -> None:
        # The guard may exchange votes from here on, and this rank waits for the others in them as well.
        if getattr(self._optimizer, "_handles", None):
            self._scalars.waiting()

    def _averaged(self) -> None:
        """Take the norm of the averages before the script clips them."""
        self._scalars.arrived()
        if hasattr(self._optimizer, "_starting_models"):
            return  # Adasum averages no gradients
        averages = [each.grad for each in parameters_of(self._optimizer) if each.grad is not None]
        # One fused call takes all dense gradients whose squares cannot overflow.
        plain = [each.dtype in _WIDE and not each.is_sparse for each in averages]
        norms = [each if alike else _norm(each) for each, alike in zip(averages, plain, strict=True)]
        if norms:
            self._values[self._tag] = torch.nn.utils.get_total_norm(norms)

    def _ended(self) -> None:
        self._scalars.stepped(self._values)
        self._values.clear()


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = None if values.dtype in _WIDE else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm
