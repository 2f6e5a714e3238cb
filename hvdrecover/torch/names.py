"""The names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """An optimizer's parameters, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def names(components: Mapping[str, Any]) -> dict[int, str]:
    """Names of parameters, by identity: ``model.0.weight``, or ``optimizer's parameter 2``.

    Args:
        components: modules and optimizers, by attribute name.
    """
    found: dict[int, str] = {}
    for name, component in components.items():
        if isinstance(component, torch.nn.Module):
            found |= {id(each): f"{name}.{inner}" for inner, each in component.named_parameters()}
    for name, component in components.items():
        if isinstance(component, torch.optim.Optimizer):
            for number, each in enumerate(parameters_of(component)):
                found.setdefault(id(each), f"{name}'s parameter {number}")
    return found
