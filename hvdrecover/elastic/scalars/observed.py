"""What a training script tells of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvdrecover.elastic.interfaces import Framework
from hvdrecover.errors import ConfigError

Number = Any
"""A number, or a tensor of one, which may still be on its way."""


class Observed:
    """Takes what a script tells, without waiting for a device.

    Args:
        framework: facts about the framework.

    """

    def __init__(self, framework: Framework) -> None:
        self._framework = framework
        self._losses: Number = 0.0  # zero, if all that were told are finite; else NaN

    def take(self, values: Mapping[str, Any]) -> dict[str, Number]:
        """Copies of values, by name; those that are None are left out.

        Raises:
            ConfigError: a value is not a number.
        """
        taken = {name: self._copy(name, value) for name, value in values.items() if value is not None}
        if "loss" in taken:
            self._losses = self._losses + taken["loss"] * 0
        return taken

    def take_not_finite(self) -> list[str]:
        """``loss``, if one that was told since the last time was NaN or infinite."""
        losses, self._losses = self._losses, 0.0
        return [] if math.isfinite(float(losses)) else ["loss"]

    def _copy(self, name: str, value: Any) -> Number:
        if not hasattr(value, "__float__"):
            raise ConfigError(
                f"observe({name}=)",
                f"a {type(value).__name__} is no number; if a graph makes it, have it returned first",
            )
        if math.prod(getattr(value, "shape", ())) != 1:
            raise ConfigError(f"observe({name}=)", f"an array of shape {tuple(value.shape)} is no number")
        number = value[(0,) * len(value.shape)] if getattr(value, "shape", ()) else value
        return self._framework.clone(number) if self._framework.is_tensor(number) else number
