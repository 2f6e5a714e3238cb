"""Carrying out virtual ranks in torch: their buffers swapped in, their gradients summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvdrecover.elastic.commits.own import Value
from hvdrecover.elastic.virtual.shares import Counts
from hvdrecover.torch.virtual.buffers import Buffers
from hvdrecover.torch.virtual.gradients import Gradients


class TorchCarrier:
    """The torch side of virtual ranks; see `hvdrecover.elastic.virtual.ranks.Carrier`.

    Args:
        components: the state's attributes by name, modules and optimizers among them.
        size: number of virtual ranks.

    Attributes:
        values: the modules' buffers, if they have any.

    Raises:
        ConfigError: an optimizer is not one of ``DistributedOptimizer``, or does what virtual ranks can't.
    """

    def __init__(self, components: Mapping[str, Any], size: int) -> None:
        modules = {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}
        self._buffers = Buffers(modules)
        self.values: Mapping[str, Value] = {"_buffers": self._buffers} if self._buffers.exist else {}
        self._gradients = [
            Gradients(name, each, size)
            for name, each in components.items()
            if isinstance(each, torch.optim.Optimizer)
        ]

    def begin(self, counts: Counts, process: int) -> None:
        """A step begins."""
        self._buffers.absorb()
        for each in self._gradients:
            each.begin(counts, process)

    def part_begins(self, rank: int) -> None:
        """Swap the buffers of a virtual rank in."""
        self._buffers.swap_in(rank)
        for each in self._gradients:
            each.part_begins()

    def part_ends(self, rank: int) -> None:
        """Take the gradients of a virtual rank, and keep its buffers."""
        for each in self._gradients:
            each.part_ends()
        self._buffers.swap_out(rank)

    def finish(self) -> None:
        """Sum the gradients of all virtual ranks."""
        for each in self._gradients:
            each.finish()

    def abandon(self) -> None:
        """Forget what is under way."""
        for each in self._gradients:
            each.abandon()
