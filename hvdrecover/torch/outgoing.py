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
_LATER = object()  # in the place of Horovod's handle


class Outgoing:
    """Looks at what a Horovod-wrapped optimizer sends.

    Large gradients are gone through here, and only here: one that is not finite has its first number made
    NaN, so that after the allreduce a look at this number is enough. Elsewhere than on the CPU, to go through
    them again is fast, and to wait for what a look says is not.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._totals: dict[int, torch.Tensor] = {}  # of gradients, by their parameter's identity
        self._bad: set[int] = set()
        self._sends = False
        compressed = optimizer._compression is not hvd.Compression.none  # what is sent may overflow
        here = [each for each in parameters_of(optimizer) if each.requires_grad and each.is_cpu]
        self._first = {
            id(each): (0,) * each.dim()
            for each in here
            if each.numel() > _LARGE and each.dtype in (torch.float32, torch.float64) and not compressed
        }
        self._small = _small([each for each in here if each.numel() <= _LARGE and not each.is_complex()])
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

    def glance(self, parameter: torch.Tensor) -> torch.Tensor:
        """Numbers that are not all finite if the average of a gradient isn't."""
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse or gradient.is_complex():
            return total(gradient)
        first = self._first.get(id(parameter))
        return gradient if first is None else gradient[first]

    def _complete(self, parameter: torch.Tensor) -> tuple[Any, Any]:
        """In the place of Horovod's function that sends a gradient; returns its handle and its context."""
        gradient = parameter.grad
        if gradient is not None:  # else Horovod makes one of zeros
            if id(parameter) in self._small and not self._sends and not gradient.is_sparse:
                return _LATER, None
            self._look(parameter, gradient)
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
        handles = self._optimizer._handles
        small = [each for each, (handle, _) in handles.items() if handle is _LATER]
        if small and not are_finite([each.grad for each in small]):
            self._bad.update(id(each) for each in small if not are_finite([each.grad]))
        self._sends = True
        try:
            for each in small:
                handles[each] = self._send(each)
            self._synchronize()
        finally:
            self._sends = False


def _small(parameters: Iterable[torch.Tensor]) -> set[int]:
    """The identities of those whose gradients wait for each other: the smallest, as far as there is room."""
    smallest = sorted(parameters, key=torch.numel)
    ends = itertools.accumulate(map(torch.numel, smallest))
    return {id(each) for each, end in zip(smallest, ends, strict=True) if end <= _WAITING}
