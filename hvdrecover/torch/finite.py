"""Whether tensors hold nothing but finite numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def not_finite(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    dense = {name: values(tensor) for name, tensor in tensors.items()}
    if not dense or math.isfinite(float(torch.nn.utils.get_total_norm(list(dense.values())))):
        return []
    # The norm of large numbers may be infinite though none of them is.
    return [name for name, tensor in dense.items() if not bool(torch.isfinite(tensor).all())]


def values(tensor: torch.Tensor) -> torch.Tensor:
    """What numbers a tensor holds; of a sparse one those that are not zero."""
    detached = tensor.detach()
    return detached._values() if detached.is_sparse else detached
