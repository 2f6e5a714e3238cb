"""Numbers that a training script reports of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvdrecover.elastic.interfaces import Framework
from hvdrecover.errors import ConfigError

Number = Any
"""A number, or a tensor of one, which may still be on its way."""


def observed(framework: Framework, values: Mapping[str, Any]) -> dict[str, Number]:
    """Return copies of values, by name, without waiting for a device; those that are None are left out.

    Args:
        framework: knows its tensors.
        values: as the script reports them.

    Raises:
        ConfigError: a value is not a number.
    """
    return {name: _copy(framework, name, value) for name, value in values.items() if value is not None}


def _copy(framework: Framework, name: str, value: Any) -> Number:
    if not hasattr(value, "__float__"):
        raise ConfigError(
            f"log_metrics({name}=)",
            f"a {type(value).__name__} is not a number; if a graph makes it, have it returned first",
        )
    if math.prod(getattr(value, "shape", ())) != 1:
        raise ConfigError(f"log_metrics({name}=)", f"an array of shape {tuple(value.shape)} is not a number")
    number = value[(0,) * len(value.shape)] if getattr(value, "shape", ()) else value
    return framework.clone(number) if framework.is_tensor(number) else number
