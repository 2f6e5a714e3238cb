"""This rank's own gradients, looked at before Horovod sends them off."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.torch.finite import are_finite, look, total
from hvdrecover.torch.names import parameters_of

_LARGE = 1 << 14  # elements; to go through fewer costs less than to tell whether it is needed
_MARKED = (torch.float32, torch.float64)
_Handle = tuple[Any, Any]  # and a context
_gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class Outgoing:
    """Looks at what a Horovod-wrapped optimizer sends, so that a look at few of the averages is enough.

    Large gradients on the CPU are checked here only. If one is not finite, its first number is set to NaN, so
    that all ranks find NaN there in the average. On other devices the averages are checked as a whole: that
    is fast there, but to wait for the result of a check is not.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._totals: dict[int, torch.Tensor] = {}  # of gradients, by their parameter's identity
        self._bad: set[int] = set()  # parameters whose gradients here were not finite
        self._optimizer = optimizer
        self._large: dict[int, torch.Tensor] = {}
        self._others: list[torch.Tensor] = []
        self._sort()
        self._send: Callable[[torch.Tensor], _Handle] = optimizer._allreduce_grad_async
        self._send_group: Callable[[tuple[torch.Tensor, ...]], _Handle] = (
            optimizer._grouped_allreduce_grad_async
        )
        if (virtual := getattr(optimizer, "virtual_gradients", None)) is not None:
            virtual.looks = self._look_at_part
        optimizer._allreduce_grad_async = self._complete
        optimizer._grouped_allreduce_grad_async = self._group_complete

    def _sort(self) -> None:
        """Tell large parameters from others."""
        compressed = self._optimizer._compression is not hvd.Compression.none  # what is sent may overflow
        self._large, self._others = {}, []
        for each in parameters_of(self._optimizer):
            if each.is_cpu and each.numel() > _LARGE and each.dtype in _MARKED and not compressed:
                self._large[id(each)] = each
            else:
                self._others.append(each)

    def is_bad(self, parameter: torch.Tensor) -> bool:
        """Return whether this rank has sent a gradient that was not finite, or whose sum was not."""
        own = self._totals.get(id(parameter))
        return id(parameter) in self._bad or (own is not None and not math.isfinite(own.item()))

    def forget(self) -> None:
        """Forget what has been sent."""
        self._totals.clear()
        self._bad.clear()

    def averages_are_finite(self) -> bool:
        """Return whether no rank seems to have sent a bad number; if so, there is nothing to remember."""
        if len(self._large) + len(self._others) != sum(
            len(group["params"]) for group in self._optimizer.param_groups
        ):
            self._sort()  # some were added
        averages = [*map(_gradient_of, self._others)]
        for each in self._large.values():
            if (gradient := each.grad) is not None:
                averages.append(gradient if gradient.is_sparse else gradient[_first(gradient)])
        told = look(*averages)
        finite = are_finite(averages) if told is None else told
        if finite and (self._totals or self._bad):
            self.forget()
        return finite

    def _complete(self, parameter: torch.Tensor) -> _Handle:
        """In the place of Horovod's function that sends a gradient."""
        if not (finite := look(parameter.grad)):
            self._look_closer(parameter, finite)
        elif self._bad:
            self._bad.discard(id(parameter))  # of a step that loss scaling has left out
        return self._send(parameter)

    def _look_at_part(self, parameter: torch.Tensor) -> None:
        """Look at the gradient of one virtual rank, of which this process has several."""
        if not (finite := look(parameter.grad)):
            self._look_closer(parameter, finite)

    def _group_complete(self, parameters: tuple[torch.Tensor, ...]) -> _Handle:
        for each in parameters:
            self._look_closer(each, look(each.grad))
        return self._send_group(parameters)

    def _look_closer(self, parameter: torch.Tensor, finite: bool | None) -> None:
        gradient = parameter.grad
        if gradient is None:  # Horovod makes one of zeros
            return
        if finite is None:
            self._totals[id(parameter)] = own = total(gradient)
            finite = not own.is_cpu or math.isfinite(own.item())  # elsewhere, nothing is waited for
        if finite:
            self._bad.discard(id(parameter))
        else:
            self._bad.add(id(parameter))
            if id(parameter) in self._large and not gradient.is_sparse:
                gradient[_first(gradient)] = math.nan


def _first(tensor: torch.Tensor) -> tuple[int, ...]:
    """The place of a tensor's first number."""
    return (0,) * tensor.dim()
