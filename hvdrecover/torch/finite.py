"""Looks at whether tensors are finite.

A sum is not finite if one of its terms isn't, and needs one pass and no memory. It may also be infinite
because its terms are large, so what it says is looked into before anybody is blamed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

try:
    from hvdrecover.torch._finite import are_finite as _compiled
except ImportError:  # the package was installed without a C compiler
    _compiled = None  # type: ignore[assignment]


def _unknown(*tensors: torch.Tensor | None) -> bool | None:
    return None


def _look() -> Callable[..., bool | None]:
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    return _unknown if _compiled is None or table is None else functools.partial(_compiled, table)


look = _look()
"""Tell whether tensors hold finite numbers only, or are None. Answers None if no compiled code can."""


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    if all_finite(total(tensor) for tensor in tensors.values()):
        return []
    return [name for name, tensor in tensors.items() if not bool(torch.isfinite(values(tensor)).all())]


def total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's numbers, in float32 at least; nothing is waited for."""
    held = values(tensor)
    return held.sum(dtype=torch.float32) if held.itemsize < 4 else held.sum()


def all_finite(totals: Iterable[torch.Tensor]) -> bool:
    """Return whether numbers are all finite; those of a device are fetched from it at once."""
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for each in totals:
        if each.is_cpu:
            if not math.isfinite(each.item()):
                return False
        else:
            elsewhere.setdefault(each.device, []).append(each)
    return all(math.isfinite(torch.stack(each).sum().item()) for each in elsewhere.values())


def are_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether tensors hold finite numbers only; for small ones, as to sum up a large one costs less.

    All are looked at by what torch's own scaler of losses looks at gradients with, in one call. It also
    multiplies them, here by one, which changes no bit.
    """
    held = [values(tensor) for tensor in tensors if tensor is not None]
    here = [tensor for tensor in held if tensor.is_cpu]
    groups: dict[object, list[torch.Tensor]] = {"here": here} if here else {}
    if len(here) < len(held):
        for tensor in held:
            if not tensor.is_cpu:
                groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    devices = [_look_at(group) for group in groups.values()]  # all are asked before one is waited for
    if all(flags.found.item() == 0 for flags in devices):
        return True
    for flags in devices:
        flags.flag.zero_()
    return False


class _Flags:
    """The tensors needed on a device: a flag that others were not finite, and a one.

    Attributes:
        found: the flag's value is its ``item()``.
    """

    def __init__(self, device: torch.device) -> None:
        self.flag = torch.zeros((), device=device)
        self.one = torch.ones((), device=device)
        self.found: Any = self.flag.numpy() if self.flag.is_cpu else self.flag  # quicker, as no operation


def _look_at(tensors: list[torch.Tensor]) -> _Flags:
    """Raise the flag of the tensors' device if they are not all finite."""
    flags = _flags(tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flags.flag, flags.one)
    return flags


_flags = functools.cache(_Flags)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers: of a sparse one those that are not zero, of complex ones both parts."""
    held = tensor.detach()
    if held.is_sparse:
        held = held._values()
    return torch.view_as_real(held) if held.is_complex() else held
