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
        if memory is None or memory.shape != tensor.shape:
            return tensor.clone()
        return memory.copy_(tensor)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor into a buffer."""
        with torch.no_grad():
            self._tensor(name).copy_(tensor)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a copy, as `read` writes over it."""
        return tensor.clone()

    def bits(self, tensor: torch.Tensor) -> bytes:
        """Return the bytes of a copy of a buffer."""
        return bytes(_bytes(tensor).cpu().numpy().tobytes())

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return whether two copies of a buffer have the same bits."""
        return torch.equal(_bytes(one), _bytes(other).to(one.device))

    def changed(self, copies: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of the buffers that are not the same as their copies.

        They are compared: batch norm does not raise the version of its buffers.
        """
        # At once if nothing has changed, as for each comparison a device is waited for.
        present = {name: self._tensor(name).detach() for name in copies}
        if len({each.device for each in (*present.values(), *copies.values())}) == 1 and torch.equal(
            *(torch.cat([_bytes(each) for each in tensors.values()]) for tensors in (present, copies))
        ):
            return []
        return [name for name, each in copies.items() if not self.same(present[name], each)]

    def _tensor(self, name: str) -> torch.Tensor:
        module, key = self._slots[name]
        tensor: torch.Tensor = module[key]
        return tensor


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _slots(modules: Mapping[str, torch.nn.Module]) -> Iterator[tuple[str, _Slot]]:
    for attribute, module in modules.items():
        for prefix, each in module.named_modules():
            for key in each._buffers:
                yield ".".join(filter(None, (attribute, prefix, key))), (each._buffers, key)
