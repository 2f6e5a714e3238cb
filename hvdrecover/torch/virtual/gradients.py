"""The gradients of the virtual ranks that a process carries out, summed up to those of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.elastic.virtual.tree import Node, RunningSum, pieces
from hvdrecover.errors import ConfigError
from hvdrecover.torch.virtual.exchange import SUMMED_BY_HOROVOD, Allreduced, Alone, Entry, Exchange
from hvdrecover.torch.virtual.segments import Buffers, Segments, cut
from hvdrecover.torch.virtual.takeover import take_over

_Sum = RunningSum[torch.Tensor | None]


class Gradients:
    """Takes the gradients of one optimizer from each backward pass, and gives it those of the whole job.

    In a step, `begin`; for each virtual rank of this process `part_begins`, backward passes, `part_ends`;
    then `finish`. Backward passes add gradients up, and send each sum off as soon as it is there.
    A parameter without a gradient on some virtual ranks has zeros there.

    Args:
        name: the optimizer's attribute of the state.
        optimizer: wrapped by ``hvd.DistributedOptimizer``; no longer averages gradients by itself.
        size: the number of virtual ranks.
        looks: is given each parameter whose ``grad`` is that of one virtual rank, before it is summed up.

    Raises:
        ConfigError: gradients of this optimizer can't be summed up independently of the number of processes.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        size: int,
        looks: Callable[[torch.Tensor], object] = lambda parameter: None,
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._size = size
        self._looks = looks
        halves = (
            optimizer._compression is hvd.Compression.fp16 if hasattr(optimizer, "_compression") else False
        )
        self._entries = [
            Entry(
                f"virtual.{name}.{inner}",
                parameter,
                torch.float16 if halves and parameter.is_floating_point() else parameter.dtype,
                size if optimizer.op == hvd.Average else 1,
            )
            for inner, parameter in take_over(name, optimizer)
        ]
        self._segments = cut(self._entries)
        self._buffers = Buffers()
        self._watched = False
        self._exchange: Exchange | None = None
        self._finished = False
        self._part: _Part | None = None
        self._own: list[Node] = []
        self._next = 0  # virtual rank
        self._sums: list[_Sum] = []
        optimizer.synchronize = self._synchronized
        optimizer.register_step_pre_hook(self._stepping)

    def begin(self, shares: Sequence[int], rank: int) -> None:
        """Begin a step, and forget one that was not finished.

        Args:
            shares: the number of virtual ranks of each process.
            rank: this process.
        """
        self.abandon()
        if not self._watched:  # only now, so that hooks of others come first and see the gradients
            self._watched = True
            for place, entry in enumerate(self._entries):
                hook = partial(self._arrived, place)
                entry.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for entry in self._entries:
            entry.parameter.grad = None
        layout = pieces(shares)
        self._own = layout[rank]
        self._next = sum(shares[:rank])
        self._exchange = self._way(layout, rank)
        self._new_sums()

    def part_begins(self) -> None:
        """Begin the backward passes of the next virtual rank of this process."""
        leaf = self._next
        piece = next((number for number, node in enumerate(self._own) if node[-1] == leaf), None)
        self._part = _Part(range(leaf, leaf + 1), piece, [0] * len(self._entries))
        self._next += 1

    def part_ends(self) -> None:
        """Take the gradients of which fewer backward passes have come than the optimizer was told."""
        assert self._part is not None
        for place, passes in enumerate(self._part.passes):
            if passes < self._optimizer.backward_passes_per_step:
                self._take(place, self._part)
        if self._part.piece is not None:
            self._new_sums()
        self._part = None

    def finish(self) -> None:
        """Wait for the other processes; then each parameter's gradient is that of the job.

        Raises:
            HorovodInternalError: a process was lost.
        """
        assert self._exchange is not None
        self._exchange.finish()
        self._exchange = None
        self._finished = True

    def abandon(self) -> None:
        """Forget a step that is under way, as after a fault."""
        if self._exchange is not None:
            self._exchange.abandon()
        self._exchange = self._part = None
        self._finished = False
        self._sums = []

    def _way(self, layout: Sequence[Sequence[Node]], rank: int) -> Exchange:
        if len(layout) == 1:
            return Alone(self._entries)
        if sum(map(len, layout)) <= 2 and all(each.wire in SUMMED_BY_HOROVOD for each in self._entries):
            return Allreduced(self._entries)
        prefix = f"virtual.{self._name}"
        return Segments(self._entries, self._segments, layout, rank, prefix, self._buffers)

    def _new_sums(self) -> None:
        self._sums = [_Sum(self._size, _add) for _ in self._entries]

    def _arrived(self, place: int, parameter: torch.Tensor) -> None:
        """A backward pass has left its gradient."""
        part = self._part
        if part is None:
            return
        part.passes[place] += 1
        declared = self._optimizer.backward_passes_per_step
        if part.passes[place] > declared:
            raise ConfigError(
                f"state.{self._name}",
                f"{self._entries[place].name.removeprefix(f'virtual.{self._name}.')} has had more than "
                f"{declared} backward passes in one virtual rank's part of a step; "
                "tell DistributedOptimizer(backward_passes_per_step=…) how many there are",
            )
        if part.passes[place] == declared:
            self._take(place, part)

    def _take(self, place: int, part: _Part) -> None:
        entry, running = self._entries[place], self._sums[place]
        if entry.parameter.grad is not None:
            self._looks(entry.parameter)
        running.push(part.leaf, self._leaf(entry))
        if part.piece is not None:
            assert self._exchange is not None
            self._exchange.give(part.piece, place, running.values[0])
            running.values.clear()

    def _leaf(self, entry: Entry) -> torch.Tensor | None:
        """A virtual rank's gradient, which the parameter gives away."""
        parameter, gradient = entry.parameter, entry.parameter.grad
        if gradient is None:
            return None
        parameter.grad = None
        gradient = gradient.detach()
        if gradient.is_sparse:
            if not self._optimizer.sparse_as_dense:
                raise ConfigError(
                    f"state.{self._name}",
                    f"{entry.name} has a sparse gradient, which virtual ranks can't sum up; pass "
                    "DistributedOptimizer(sparse_as_dense=True), or make its layer with sparse=False",
                )
            gradient = gradient.to_dense()
        if gradient.stride() != parameter.stride():
            # The same in memory, whoever had it.
            gradient = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        return gradient.to(entry.wire)

    def _synchronized(self) -> None:
        """In the place of Horovod's: called by ``step``, or by a script that clips gradients."""
        if not self._finished:
            raise ConfigError(
                f"state.{self._name}",
                "stepped, or synchronized, without gradients of a whole step of all virtual ranks; do so "
                "after the inner loop ran to its end: for step in state.steps(loader): for part in step: …",
            )
        self._optimizer._synchronized = True

    def _stepping(self, optimizer: Any, arguments: Any, keywords: Any) -> None:
        if not optimizer._should_synchronize:  # or else Horovod's `step` synchronizes
            self._synchronized()


class _Part:
    """The backward passes of one virtual rank.

    Args:
        leaf: the virtual rank.
        piece: the number of this process's subtree that ends with it, if one does.
        passes: that each entry has had.
    """

    def __init__(self, leaf: Node, piece: int | None, passes: list[int]) -> None:
        self.leaf = leaf
        self.piece = piece
        self.passes = passes


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two partial sums, in the place of one; what is missing changes no number."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
