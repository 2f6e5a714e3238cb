"""Marks of the parts of a training step, and norms of its gradients, by hooks of torch's own.

A step ends when the first of the optimizers has stepped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdrecover.elastic.scalars.scalars import Scalars
from hvdrecover.torch.hooks import before_calls
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.stepping import stepping

_WIDE = (torch.float32, torch.float64)


def watch(components: Mapping[str, Any], scalars: Scalars) -> None:
    """Have modules and optimizers tell of their steps.

    Args:
        components: by attribute name.
        scalars: are told.
    """

    def called(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        # What is compiled can't tell the time.
        if module.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            scalars.fetched()

    for component in components.values():
        if isinstance(component, torch.nn.Module):
            before_calls(component, called)
    optimizers = {name: each for name, each in components.items() if isinstance(each, torch.optim.Optimizer)}
    for number, (name, optimizer) in enumerate(optimizers.items()):
        suffix = f"/{name}" if len(optimizers) > 1 else ""
        _Steps(optimizer, scalars, suffix, counts=number == 0)


class _Steps:
    """Watches one optimizer.

    Args:
        optimizer: wrapped by ``hvd.DistributedOptimizer`` or not.
        scalars: are told.
        suffix: of the names of its norms.
        counts: whether its steps are those of the job.
    """

    def __init__(self, optimizer: Any, scalars: Scalars, suffix: str, *, counts: bool) -> None:
        self._optimizer = optimizer
        self._scalars = scalars
        self._suffix = suffix
        self._counts = counts
        self._norms: dict[int, torch.Tensor] = {}
        steps = stepping(optimizer)
        steps.begins.append(self._begins)
        steps.averaging.append(scalars.waiting)
        steps.averaged.append(self._averaged)
        steps.ended.append(self._ended)
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _arrived(self, parameter: torch.Tensor) -> None:
        """A gradient of this rank's own is complete; averages will take its place."""
        if parameter.grad is not None:
            self._norms[id(parameter)] = _norm(parameter.grad)

    def _begins(self) -> None:
        if getattr(self._optimizer, "_handles", None):
            self._scalars.waiting()  # also for what others may have their ranks tell each other now

    def _averaged(self) -> None:
        """The averages are there; a script may clip them next."""
        self._scalars.arrived()
        if not hasattr(self._optimizer, "_starting_models"):  # as Adasum's has
            averages = [each.grad for each in parameters_of(self._optimizer) if each.grad is not None]
            # All at once; but those whose squares may be too large for them, or that are in pieces, alone.
            plain = [each.dtype in _WIDE and not each.is_sparse for each in averages]
            norms = [each if alike else _norm(each) for each, alike in zip(averages, plain, strict=True)]
            self._measured("averaged_gradient", norms)

    def _ended(self) -> None:
        self._measured("own_gradient", list(self._norms.values()))
        self._norms = {}
        if self._counts:
            self._scalars.stepped()

    def _measured(self, name: str, norms: list[torch.Tensor]) -> None:
        """The norm of parts, or of their norms, which is the same."""
        if norms:
            self._scalars.measured({f"norm/{name}{self._suffix}": torch.nn.utils.get_total_norm(norms)})


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    wide = None if values.dtype in _WIDE else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=wide)
    return norm
