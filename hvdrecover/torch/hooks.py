"""What is done when a module is called, without being in the way when the module is copied or stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

Action = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], object]
"""Is given the module, and what it is called with."""


def before_calls(module: torch.nn.Module, action: Action) -> None:
    """Do something before each call of a module.

    Copies of the module, and what ``torch.save`` stores of it, do without.

    Args:
        module: the module.
        action: what to do.
    """
    module.register_forward_pre_hook(_Hook(action), with_kwargs=True)


class _Hook:
    """A hook whose copies do nothing, and that can be unpickled where hvdrecover is not installed."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._action(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any three arguments, and returns None
