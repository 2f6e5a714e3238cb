"""Tensors and gradients that commits lack, as the ``state_dict`` of the object leaves them out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


def unkept(component: Any) -> list[str]:
    """Names of what a component holds and its ``state_dict`` leaves out.

    A model's other tensors may be constants. So they are named only if the ``state_dict`` is empty, or if a
    torchmetrics metric declares them as its state.
    """
    parts = dict(component.named_modules()) if isinstance(component, torch.nn.Module) else {"": component}
    declared = [name for path, part in parts.items() for name in _of_metric(path, part)]
    if declared or pytree.tree_leaves(component.state_dict()):
        return declared
    return [name for path, part in parts.items() for name in _tensors(path, part)]


def _of_metric(path: str, part: Any) -> Iterator[str]:
    """The states of a metric that are not persistent, as they are not unless a script says so."""
    persistent = getattr(part, "_persistent", None)
    if isinstance(part, torch.nn.Module) and isinstance(persistent, dict):
        yield from (_join(path, name) for name in getattr(part, "_defaults", ()) if not persistent.get(name))


def _tensors(path: str, part: Any) -> Iterator[str]:
    held = {**getattr(part, "__dict__", {}), **getattr(part, "_buffers", {})}
    for name, value in held.items():
        if name != "_buffers" and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            yield _join(path, name)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def passes(component: Any) -> tuple[int, int]:
    """Return how many backward passes have ended since the last step, and how many a step needs."""
    of = getattr(component, "backward_passes_per_step", 1)
    delays = getattr(component, "_allreduce_delay", None)  # other libraries' optimizers lack it
    if of == 1 or delays is None or hasattr(component, "virtual_gradients"):
        return 0, 1
    return of - min(delays.values(), default=of), of


def forget_passes(component: Any) -> None:
    """Let an optimizer count backward passes from 0 again, as it does when it loads a commit."""
    if passes(component)[0]:
        component._handles.clear()
        component.set_backward_passes_per_step(component.backward_passes_per_step)
        component.zero_grad()
