"""Scalars of training: times of steps, and norms of gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdrecover.scalars import Scalars
from hvdrecover.torch.optimizers import parameters_of
from hvdrecover.torch.stepping import averages, is_adasum, steps_of

_WIDE = (torch.float32, torch.float64)


def watch(components: Mapping[str, Any], scalars: Scalars) -> None:
    """Report the steps of optimizers. A step of the job ends when the first optimizer has stepped."""
    optimizers = {name: each for name, each in components.items() if isinstance(each, torch.optim.Optimizer)}
    norms: dict[str, torch.Tensor] = {}  # of the step under way
    for name, optimizer in optimizers.items():
        tag = "norm/averaged_gradient" + (f"/{name}" if len(optimizers) > 1 else "")
        _watch(optimizer, scalars, norms, tag)

    def ended() -> None:
        scalars.stepped(norms)
        norms.clear()

    for optimizer in [*optimizers.values()][:1]:
        steps_of(optimizer).ended.append(ended)


def _watch(optimizer: Any, scalars: Scalars, norms: dict[str, torch.Tensor], tag: str) -> None:
    def begins() -> None:
        # The guard may exchange votes from here on, and this rank waits for the others in them as well.
        if getattr(optimizer, "_handles", None):
            scalars.waiting()

    def averaged() -> None:
        """Take the norm of the averages before the script clips them."""
        scalars.arrived()
        gradients = [each.grad for each in parameters_of(optimizer) if each.grad is not None]
        # One fused call takes all dense gradients whose squares cannot overflow.
        parts = [each if each.dtype in _WIDE and not each.is_sparse else _norm(each) for each in gradients]
        if parts:
            norms[tag] = torch.nn.utils.get_total_norm(parts)

    steps = steps_of(optimizer)
    steps.begins.append(begins)
    steps.averaging.append(scalars.waiting)
    if averages(optimizer):
        steps.averaged.append(averaged)
    elif not is_adasum(optimizer):  # a plain optimizer applies its gradients as they are
        steps.applying.append(averaged)


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = None if values.dtype in _WIDE else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm
