"""The buffers of modules, such as batch norm's statistics, of which each virtual rank has its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hvdrecover.elastic.virtual import buffers

_Slot = tuple[dict[str, Any], str]
"""A module's dict of buffers, and a name in it."""


class Buffers(buffers.Buffers):
    """See `hvdrecover.elastic.virtual.buffers.Buffers`.

    Args:
        modules: by attribute name; they keep their tensors.
    """

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._slots = dict(_slots(modules))
        self._seen: dict[str, tuple[torch.Tensor, int]] = {}  # when last read or written, at this version
        super().__init__()

    def names(self) -> Iterator[str]:
        """Return the names of the buffers that are not None."""
        return (name for name, (buffers, key) in self._slots.items() if buffers[key] is not None)

    def knows(self, name: str) -> bool:
        """Return whether the modules have such a buffer."""
        return name in self._slots

    def read(self, name: str, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Return a copy of a buffer, in the memory of an earlier one if there is one."""
        tensor = self._tensor(name).detach()
        self._see(name)
        if memory is None or memory.shape != tensor.shape:
            return tensor.clone()
        return memory.copy_(tensor)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into a buffer."""
        with torch.no_grad():
            self._tensor(name).copy_(tensor)
        self._see(name)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a copy, as `read` writes over it."""
        return tensor.clone()

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """See the base class; without a wait for a device, unless the script has touched it."""
        present = self._tensor(name)
        seen, version = self._seen[name]
        return (present is seen and present._version == version) or torch.equal(present, tensor)

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two copies of a buffer are equal."""
        # Compared rather than told by the tensors' versions, which batch norm does not count up.
        return torch.equal(one, other)

    def _see(self, name: str) -> None:
        tensor = self._tensor(name)
        self._seen[name] = tensor, tensor._version

    def _tensor(self, name: str) -> torch.Tensor:
        module, key = self._slots[name]
        tensor: torch.Tensor = module[key]
        return tensor


def _slots(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, _Slot]]:
    for attribute, module in modules.items():
        for prefix, each in module.named_modules():
            for key in each._buffers:
                yield ".".join(filter(None, (attribute, prefix, key))), (each._buffers, key)
