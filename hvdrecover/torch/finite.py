"""Whether tensors hold nothing but finite numbers.

A sum is not finite if one of its terms isn't, and needs one pass and no memory. It may also be infinite
because its terms are large, so what it says is looked into before anybody is blamed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

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


def values(tensor: torch.Tensor) -> torch.Tensor:
    """What numbers a tensor holds: of a sparse one those that are not zero, of complex ones both parts."""
    held = tensor.detach()
    if held.is_sparse:
        held = held._values()
    return torch.view_as_real(held) if held.is_complex() else held
