"""Hooks on calls of modules, which are not in the way when a module is copied, stored or compiled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._C import _get_tracing_state as is_traced
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

Action = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], object]
"""Is given the module, and what it is called with."""


def before_calls(module: torch.nn.Module, action: Action) -> None:
    """Do something before each call of a module.

    Copies of the module, and what ``torch.save`` stores of it, do without.

    Args:
        module: the module.
        action: what to do.
    """
    handle = module.register_forward_pre_hook(_Hook(action), with_kwargs=True)
    # Torch numbers the hooks of each process from 0: stored with a module, such a number would be taken by
    # the first hook of the process that reads it, which would then be called as ours is.
    number = -1 - handle.id
    hooks: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs)
    for each in hooks:
        each[number] = each.pop(handle.id)
    if module._compiled_call_impl is None:
        module._compiled_call_impl = _ShortCut(module, number, action)


class _Hook:
    """A hook whose copies do nothing, and that can be unpickled where hvdrecover is not installed."""

    def __init__(self, action: Action) -> None:
        self._action = action

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._action(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes any three arguments, and returns None


class _ShortCut:
    """Calls a module as torch does, from where ``Module.compile`` puts what it has compiled.

    What torch does for any hook takes longer than the rest of what a guard does in a step of a small model.
    Copies of a module do without, also of one that says by itself what is copied of it.

    Args:
        module: the module.
        number: of its hook.
        action: what the hook does.
    """

    def __init__(self, module: Any, number: int, action: Action) -> None:
        self._module = module
        self._ours = [number]
        self._action = action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if (
            list(module._forward_pre_hooks) != self._ours
            or module._forward_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            or _global_forward_pre_hooks
            or _global_forward_hooks
            or _global_backward_pre_hooks
            or _global_backward_hooks
            or is_traced()
        ):
            return module._call_impl(*args, **kwargs)
        self._action(module, args, kwargs)
        return module.forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
