"""Carrying out virtual ranks in torch: their buffers swapped in, their gradients summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.elastic.commits.own import Value
from hvdrecover.elastic.virtual import collectives
from hvdrecover.elastic.virtual.shares import Counts
from hvdrecover.errors import ConfigError
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.virtual.buffers import Buffers
from hvdrecover.torch.virtual.gradients import Gradients
from hvdrecover.torch.virtual.replaying import TorchLeaves, packed, unpacked


class TorchCarrier:
    """The torch side of virtual ranks; see `hvdrecover.elastic.virtual.ranks.Carrier`.

    Args:
        components: the state's attributes by name, modules and optimizers among them.
        size: number of virtual ranks.

    Attributes:
        values: the modules' buffers, if they have any.

    Raises:
        ConfigError: an optimizer is not one of ``DistributedOptimizer``, or does what virtual ranks can't; or
            a module averages statistics over processes.
    """

    def __init__(self, components: Mapping[str, Any], size: int) -> None:
        modules = {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}
        _refuse_averages(modules)
        collectives.watch(hvd.mpi_ops, "mpi_lib", _look)
        self._buffers = Buffers(modules)
        self.values: Mapping[str, Value] = {"_buffers": self._buffers} if self._buffers.exist else {}
        optimizers = {
            name: each for name, each in components.items() if isinstance(each, torch.optim.Optimizer)
        }
        _require_apart(optimizers)
        self._gradients = [Gradients(name, each, size) for name, each in optimizers.items()]

    @property
    def absorbed(self) -> int:
        """See `hvdrecover.elastic.virtual.ranks.Carrier`."""
        return self._buffers.absorbed

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

    # -- replays; see `hvdrecover.elastic.virtual.replay.Replaying` ------------------------------------------

    def gradients(self) -> list[TensorSpec]:
        """Return the gradients of a part."""
        return [
            TorchFramework().spec(
                torch.empty((), dtype=entry.wire).expand(entry.parameter.shape),
                entry.of_user,
            )
            for each in self._gradients
            for entry in each.entries
        ]

    def hold(self, rank: int) -> None:
        """Keep the gradients of a virtual rank until `release`."""
        for each in self._gradients:
            each.hold(rank)

    def held(self) -> TorchLeaves:
        """Return them."""
        return TorchLeaves([(each.entries, each.held) for each in self._gradients])

    def release(self) -> None:
        """Let them take their way."""
        for each in self._gradients:
            each.release()

    def replay_begins(self) -> None:
        """A part begins whose gradients are only looked at."""
        for each in self._gradients:
            each.replay_begins()

    def replay_ends(self) -> TorchLeaves:
        """The part has ended."""
        return TorchLeaves([(each.entries, each.replay_ends()) for each in self._gradients])

    def packed(self, value: Any) -> bytes:
        """Return a batch as bytes for other processes."""
        return packed(value)

    def unpacked(self, data: bytes) -> Any:
        """Return what was packed."""
        return unpacked(data)

    # -- the end of a step -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Sum the gradients of all virtual ranks."""
        for each in self._gradients:
            each.finish()

    def abandon(self) -> None:
        """Forget what is under way."""
        for each in self._gradients:
            each.abandon()


def _require_apart(optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
    """Refuse a parameter of two optimizers, as only one of them would be given its gradient."""
    owners: dict[torch.Tensor, str] = {}
    for name, optimizer in optimizers.items():
        for each in parameters_of(optimizer):
            if owners.setdefault(each, name) != name:
                raise ConfigError(
                    f"state.{name}",
                    f"it has a parameter that {owners[each]} has, too, and virtual ranks give a gradient "
                    "to one optimizer; leave it to one of them",
                )


def _refuse_averages(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuse batch norm over processes."""
    for name, module in modules.items():
        for inner, each in module.named_modules(prefix=f"state.{name}"):
            if isinstance(each, hvd.SyncBatchNorm):
                batch_norm = "torch.nn.BatchNorm1d, 2d or 3d"
                raise collectives.averages(inner, "SyncBatchNorm", batch_norm, "GroupNorm")


def _look(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    ours = collectives.OURS.encode()

    def begin(*arguments: Any) -> Any:
        if not any(isinstance(each, bytes) and each.startswith(ours) for each in arguments):
            collectives.refuse(call)
        return function(*arguments)

    return begin
