"""A look at the gradients of each step: this rank's own as they come, and what all ranks have made of them.

torch calls hooks of ours when a parameter's gradient is complete, before Horovod's sends it off, and again
before an optimizer steps. Gradients that are not finite on one rank are not finite on any after the
allreduce, so all ranks see a bad step without a word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdrecover.elastic.guard.judge import Judge
from hvdrecover.errors import ConfigError
from hvdrecover.torch.finite import not_finite, values
from hvdrecover.torch.modules import Calls


class Gradients:
    """Looks at the gradients of optimizers that Horovod has wrapped; others see this rank's own only.

    Args:
        components: by attribute name; modules give parameters their names, optimizers are looked at.
        judge: is told of bad steps.

    Raises:
        ConfigError: an optimizer that does not average gradients.
    """

    def __init__(self, components: Mapping[str, Any], judge: Judge) -> None:
        self._judge = judge
        self._steps = 0
        judge.steps = lambda: self._steps
        self._names = _names(components)
        self._norms: dict[int, torch.Tensor] = {}
        self._calls = Calls(
            {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}
        )
        for name, component in components.items():
            if isinstance(component, torch.optim.Optimizer) and hasattr(component, "synchronize"):
                self._look_at(name, component)

    def _look_at(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(optimizer, "_starting_models"):
            raise ConfigError(
                f"state.{name}", "Adasum brings updates together, not gradients; pass Guard(numerics=None)"
            )
        optimizer.register_step_pre_hook(self._before)
        for number, parameter in enumerate(_parameters(optimizer)):
            self._names.setdefault(id(parameter), f"{name}'s parameter {number}")
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, parameter: torch.Tensor) -> None:
        """A gradient of this rank's own is complete."""
        if parameter.grad is not None:
            self._norms[id(parameter)] = _norm(parameter.grad)

    def _before(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        """Before a step; for Horovod's optimizers that is twice: before and after gradients are averaged."""
        if getattr(optimizer, "_handles", None) or getattr(optimizer, "found_inf", None) is not None:
            return  # not averaged yet; or loss scaling has found an overflow, and deals with it
        with_gradient = {
            self._names[id(each)]: each for each in _parameters(optimizer) if each.grad is not None
        }
        gradients = {name: each.grad for name, each in with_gradient.items() if each.grad is not None}
        bad = not_finite(gradients)
        if bad:
            self._tell(bad, [name for name in bad if not self._was_finite(with_gradient[name])])
            self._norms.clear()
            for parameter in with_gradient.values():
                parameter.grad = None  # torch's optimizers pass over what has none
        elif with_gradient:
            self._steps += 1
            self._norms.clear()

    def _tell(self, everywhere: Sequence[str], here: Sequence[str]) -> None:
        self._steps += 1
        first = self._calls.first_bad() if here else ""
        self._judge.gradients(everywhere, here, first=first, batch_size=self._calls.batch_size())

    def _was_finite(self, parameter: torch.Tensor) -> bool:
        norm = self._norms.get(id(parameter))
        return norm is None or math.isfinite(float(norm))


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    held = values(gradient)
    wide = torch.float32 if held.dtype in (torch.float16, torch.bfloat16) else None
    norm: torch.Tensor = torch.linalg.vector_norm(held, dtype=wide)
    return norm


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _names(components: Mapping[str, Any]) -> dict[int, str]:
    """What parameters are called, by identity."""
    return {
        id(parameter): f"{name}.{inner}"
        for name, component in components.items()
        if isinstance(component, torch.nn.Module)
        for inner, parameter in component.named_parameters()
    }
