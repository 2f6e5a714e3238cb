"""The names of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_WRAPPERS = {"_orig_mod", "module"}


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """An optimizer's parameters, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def plain(name: str) -> str:
    """Return a name without the parts that ``torch.compile`` and ``DataParallel`` add to it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def renamed(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a commit under the names that a module has for them, however it is wrapped."""
    known = {plain(name): name for name in mine}
    found = {name if name in mine else known.get(plain(name), name): each for name, each in stored.items()}
    return found if len(found) == len(stored) else dict(stored)


def by_name(components: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The parameters of all modules, as ``model.0.weight``, whatever wraps the modules.

    Args:
        components: modules and others, by attribute name.
    """
    found: dict[str, torch.Tensor] = {}
    for name, component in components.items():
        if isinstance(component, torch.nn.Module):
            inner = dict(component.named_parameters())
            short = {plain(key): each for key, each in inner.items()}
            inner = short if len(short) == len(inner) else inner
            found |= {f"{name}.{key}": each for key, each in inner.items()}
    return found


class Names(dict[int, str]):
    """Names of parameters, by identity: ``model.0.weight``, or ``optimizer's parameter 2``.

    Parameters that optimizers have got later are looked up when somebody asks for them.

    Args:
        components: modules and optimizers, by attribute name.
    """

    def __init__(self, components: Mapping[str, Any]) -> None:
        super().__init__()
        self._components = components
        self._look()

    def __missing__(self, key: int) -> str:
        self._look()
        return self.get(key, "a parameter without a name")

    def _look(self) -> None:
        self.update({id(each): name for name, each in by_name(self._components).items()})
        for name, component in self._components.items():
            if isinstance(component, torch.optim.Optimizer):
                for number, each in enumerate(parameters_of(component)):
                    self.setdefault(id(each), f"{name}'s parameter {number}")
