"""The way of partial sums between processes: none for one, Horovod's own allreduce for two sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import horovod.torch as hvd
import torch

from hvdrecover.elastic.virtual.collectives import OURS

Handle = Any
# Adding it changes no number, not even the sign of a zero: what has nothing to add is filled with it.
NOTHING = -0.0
SUMMED_BY_HOROVOD = (torch.float32, torch.float64)
"""Dtypes whose sum of two Horovod rounds as torch does."""


@dataclass(frozen=True)
class Entry:
    """A parameter whose gradients are summed.

    Attributes:
        name: unique in the job, and the same on all processes.
        parameter: the parameter.
        wire: the dtype in which gradients are added up and sent.
        divisor: what the sum is divided by.
    """

    name: str
    parameter: torch.Tensor
    wire: torch.dtype
    divisor: int

    @property
    def of_user(self) -> str:
        """Return the parameter's name as it was given to Horovod."""
        return self.name.removeprefix(f"{OURS}.virtual.").split(".", 1)[1]  # an optimizer's has no dots

    @property
    def is_wide(self) -> bool:
        """Return whether gradients are added up in the parameter's own dtype, and may be divided in it."""
        return self.wire == self.parameter.dtype

    def nothing(self) -> torch.Tensor:
        """Return what stands for a gradient that no virtual rank of a subtree has."""
        return torch.full_like(self.parameter, NOTHING, dtype=self.wire, requires_grad=False)

    def deliver(self, total: torch.Tensor, *, divided: bool = False) -> None:
        """Make the sum of all virtual ranks, or their average, the parameter's gradient.

        Args:
            total: the sum; in the parameter's shape and strides, and of its own memory.
            divided: whether it is an average already.
        """
        total = total.to(self.parameter.dtype)
        if self.divisor != 1 and not divided:
            total.div_(self.divisor)
        self.parameter.grad = total


class Exchange(Protocol):
    """One step's exchange; made anew for each, as shares may change.

    Every process calls `give` once for each entry and each of its subtrees, in any order, and then `finish`.
    """

    def give(self, piece: int, place: int, value: torch.Tensor | None) -> None:
        """Take a partial sum.

        Args:
            piece: the number of the subtree among those of this process.
            place: the number of the entry.
            value: the sum, which is this exchange's from now on; None if no gradient was there.
        """

    def finish(self) -> None:
        """Wait for all sums, and make them the parameters' gradients."""

    def abandon(self) -> None:
        """Forget what is under way."""


class Alone:
    """One process, which has summed up all.

    Args:
        entries: what is summed.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries

    def give(self, piece: int, place: int, value: torch.Tensor | None) -> None:
        """See `Exchange`."""
        entry = self._entries[place]
        entry.deliver(entry.nothing() if value is None else value)

    def finish(self) -> None:
        """See `Exchange`."""

    def abandon(self) -> None:
        """See `Exchange`."""


class Allreduced:
    """At most two partial sums: x + y is y + x, so Horovod may add them in any order, and fuse them.

    Args:
        entries: what is summed, of dtypes in `SUMMED_BY_HOROVOD`.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self._under_way: dict[int, tuple[Handle, torch.Tensor]] = {}

    def give(self, piece: int, place: int, value: torch.Tensor | None) -> None:
        """See `Exchange`."""
        entry = self._entries[place]
        value = entry.nothing() if value is None else value
        factor = 1.0 / entry.divisor if _is_exact(entry) else 1.0
        handle = hvd.allreduce_async_(value, name=entry.name, op=hvd.Sum, postscale_factor=factor)
        self._under_way[place] = handle, value

    def finish(self) -> None:
        """See `Exchange`."""
        for place in range(len(self._entries)):
            if place not in self._under_way:  # this process has no virtual rank
                self.give(0, place, None)
        for place, (handle, value) in self._under_way.items():
            hvd.synchronize(handle)
            entry = self._entries[place]
            entry.deliver(value, divided=_is_exact(entry))
        self._under_way.clear()

    def abandon(self) -> None:
        """See `Exchange`."""
        forget(handle for handle, _ in self._under_way.values())
        self._under_way.clear()


def forget(handles: Any) -> None:
    """Free the tensors that Horovod keeps for operations whose results nobody will ask for."""
    for handle in handles:
        hvd.mpi_ops._handle_map.pop(handle, None)


def _is_exact(entry: Entry) -> bool:
    """Return whether Horovod's multiplication by the inverse rounds as a division does."""
    return entry.is_wide and entry.divisor & (entry.divisor - 1) == 0


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
