"""This rank's own gradients, looked at before Horovod sends them off.

Horovod sends each gradient as soon as it is complete. Small ones wait here for the last of them, and are
looked at together, in one call of torch's instead of one for each. Training loses nothing by that: it has to
wait for the last one anyway, and Horovod then meets all of them in one of its cycles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.torch.finite import are_finite, total
from hvdrecover.torch.names import parameters_of

_LARGE = 1 << 14  # elements; to go through fewer costs less than to tell whether it is needed
_WAITING = 1 << 16  # elements at most that wait for each other: so few are sent in no time
_NUMPYS = (torch.float32, torch.float64)
_LATER = object()  # in the place of Horovod's handle


class Outgoing:
    """Looks at what a Horovod-wrapped optimizer sends, so that a look at few of the averages is enough.

    Large gradients are gone through here, and only here: one that is not finite has its first number made
    NaN, for all ranks to see. Of small ones, one gets a NaN for all of them. Elsewhere than on the CPU, to go
    through averages is fast, and to wait for what a look says is not.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._totals: dict[int, torch.Tensor] = {}  # of gradients, by their parameter's identity
        self._bad: set[int] = set()
        self._looked = self._sends = False
        compressed = optimizer._compression is not hvd.Compression.none  # what is sent may overflow
        self._all = list(parameters_of(optimizer))
        here = [each for each in self._all if each.requires_grad and each.is_cpu]
        self._first = {
            id(each): (0,) * each.dim()
            for each in here
            if each.numel() > _LARGE and each.dtype in _NUMPYS and not compressed
        }
        small = _small([each for each in here if each.numel() <= _LARGE and not each.is_complex()])
        self._small = {id(each) for each in small}
        self._others = [each for each in self._all if id(each) not in self._small]
        # A bias, or the like: embeddings may have sparse gradients.
        canaries = [each for each in small if each.dim() == 1 and each.dtype in _NUMPYS and not compressed]
        self._canary = canaries[0] if canaries else None
        self._send, self._send_group = (
            optimizer._allreduce_grad_async,
            optimizer._grouped_allreduce_grad_async,
        )
        self._synchronize = optimizer.synchronize
        optimizer._allreduce_grad_async = self._complete
        optimizer._grouped_allreduce_grad_async = self._group_complete
        optimizer.synchronize = self._synchronized

    def is_bad(self, parameter: torch.Tensor) -> bool:
        """Whether this rank has sent a gradient that was not finite, or whose sum was not."""
        own = self._totals.get(id(parameter))
        return id(parameter) in self._bad or (own is not None and not math.isfinite(own.item()))

    def forget(self) -> None:
        """What has been sent was all right, or is dealt with."""
        self._totals.clear()
        self._bad.clear()
        self._looked = False

    def averages_are_finite(self) -> bool:
        """Whether no rank seems to have sent a number that was not."""
        if not self._looked:
            return are_finite([self._part(each) for each in self._all if each.grad is not None])
        assert self._canary is not None
        assert self._canary.grad is not None
        # Neither an index nor a sum, as each operation of torch's costs more than to make some floats.
        if not all(map(math.isfinite, self._canary.grad.tolist())):
            return False
        others = [self._part(each) for each in self._others if each.grad is not None]
        return not others or are_finite(others)

    def _part(self, parameter: torch.Tensor) -> torch.Tensor:
        """Numbers that tell of an averaged gradient."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.is_complex():
            return total(gradient)
        first = self._first.get(id(parameter))
        return gradient if first is None else gradient[first]

    def _complete(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """In the place of Horovod's function that sends a gradient; returns its handle and its context."""
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse and id(parameter) in self._small:
            self._small.remove(id(parameter))  # it can't wait, so its average is to be looked at, from now on
            self._others.append(parameter)
        if id(parameter) not in self._small:
            if gradient is not None:  # else Horovod makes one of zeros
                self._look(parameter, gradient)
        elif not self._sends:
            return _LATER, None
        handle: tuple[Any, Any] = self._send(parameter)
        return handle

    def _group_complete(self, parameters: tuple[torch.Tensor, ...]) -> tuple[Any, Any]:
        for each in parameters:
            if each.grad is not None:
                self._look(each, each.grad)
        handle: tuple[Any, Any] = self._send_group(parameters)
        return handle

    def _look(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self._totals[id(parameter)] = own = total(gradient)
        first = self._first.get(id(parameter))
        if first is not None and not gradient.is_sparse and not math.isfinite(own.item()):
            gradient[first] = math.nan

    def _synchronized(self) -> None:
        """In the place of ``synchronize``, which a step calls, or the script."""
        self._bad.clear()  # of a step that loss scaling has left out
        handles = self._optimizer._handles
        waiting = [each for each, (handle, _) in handles.items() if handle is _LATER]
        self._looked = bool(waiting) and self._canary is not None
        if waiting and not are_finite([each.grad for each in waiting]):
            self._bad.update(id(each) for each in waiting if not are_finite([each.grad]))
            self._warn()
        self._sends = True
        try:
            for each in waiting:
                handles[each] = self._send(each)
            self._synchronize()
        finally:
            self._sends = False

    def _warn(self) -> None:
        """Have all ranks see that small gradients of this one are not finite."""
        if (canary := self._canary) is not None:
            if canary.grad is None:
                canary.grad = torch.zeros_like(canary)
            canary.grad[0] = math.nan


def _small(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose gradients wait for each other: the smallest first, as far as there is room."""
    smallest = sorted(parameters, key=torch.numel)
    ends = itertools.accumulate(map(torch.numel, smallest))
    return [each for each, end in zip(smallest, ends, strict=True) if end <= _WAITING]
