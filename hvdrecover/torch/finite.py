"""Whether tensors hold nothing but finite numbers.

A sum is not finite if one of its terms isn't, and needs one pass and no memory. It may also be infinite
because its terms are large, so what it says is looked into before anybody is blamed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch


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
    """Whether numbers are all finite; those of a device are fetched from it at once."""
    elsewhere: dict[torch.device, list[torch.Tensor]] = {}
    for each in totals:
        if each.is_cpu:
            if not math.isfinite(each.item()):
                return False
        else:
            elsewhere.setdefault(each.device, []).append(each)
    return all(math.isfinite(torch.stack(each).sum().item()) for each in elsewhere.values())


def are_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether tensors hold finite numbers only; for small ones, as to sum up a large one costs less.

    What torch's own scaler of losses looks at gradients with goes through all tensors in one call. It also
    multiplies them, here by one, which changes no bit.

    Args:
        tensors: dense ones, not complex.
    """
    groups: dict[object, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault("cpu" if tensor.is_cpu else (tensor.device, tensor.dtype), []).append(tensor)
    flags = [_look_at(group) for group in groups.values()]  # all devices are asked before one is waited for
    if not any(flag.item() for flag in flags):
        return True
    for flag in flags:
        flag.zero_()
    return False


def _look_at(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A flag of the tensors' device that is zero if they are all finite."""
    flag, one = _flags(tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, flag, one)
    return flag


@functools.cache
def _flags(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros((), device=device), torch.ones((), device=device)


def values(tensor: torch.Tensor) -> torch.Tensor:
    """What numbers a tensor holds: of a sparse one those that are not zero, of complex ones both parts."""
    held = tensor.detach()
    if held.is_sparse:
        held = held._values()
    return torch.view_as_real(held) if held.is_complex() else held
