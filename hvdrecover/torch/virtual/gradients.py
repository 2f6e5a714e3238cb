"""The gradients of the virtual ranks that a process carries out, summed up to those of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.elastic.virtual.collectives import OURS
from hvdrecover.elastic.virtual.tree import Node, RunningSum, pieces
from hvdrecover.errors import ConfigError
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.stepping import stepping
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

    Attributes:
        looks: is given each parameter whose ``grad`` is that of one virtual rank, before it is summed up.

    Raises:
        ConfigError: gradients of this optimizer can't be summed up independently of the number of processes.
    """

    def __init__(
        self,
        name: str,
        optimizer: Any,
        size: int,
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._size = size
        self.looks: Callable[[torch.Tensor], object] = lambda parameter: None
        halves = (
            optimizer._compression is hvd.Compression.fp16 if hasattr(optimizer, "_compression") else False
        )
        self._prefix = f"{OURS}.virtual.{name}"  # of the names of collectives
        self._entries = [
            Entry(
                f"{self._prefix}.{inner}",
                parameter,
                torch.float16 if halves and parameter.is_floating_point() else parameter.dtype,
                size if optimizer.op == hvd.Average else 1,
            )
            for inner, parameter in take_over(name, optimizer)
        ]
        self._known = {each.parameter for each in self._entries}
        self._segments = cut(self._entries)
        self._buffers = Buffers()
        self._watched = False
        self._exchange: Exchange | None = None
        self._wait: Callable[[], None] | None = None  # for the job's gradients
        self._finished = False
        self._part: _Part | None = None
        self._own: list[Node] = []
        self._next = 0  # virtual rank
        self._hold: int | None = None  # a virtual rank
        self._held: _Part | None = None
        self._sums: list[_Sum] = []
        optimizer.virtual_gradients = self
        steps = stepping(optimizer)
        steps.average = self._average
        steps.applying.append(self._applying)

    def begin(self, shares: Sequence[int], rank: int) -> None:
        """Begin a step, and forget one that was not finished.

        Args:
            shares: the number of virtual ranks of each process.
            rank: this process.
        """
        self.abandon()
        self._require_known()
        self._optimizer._should_synchronize = True
        if not self._watched:  # only now, so that hooks of others come first and see the gradients
            self._watched = True
            for place, entry in enumerate(self._entries):
                hook, frozen = partial(self._arrived, place), not entry.parameter.requires_grad
                entry.parameter.requires_grad_()  # or else there can't be a hook
                entry.parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                entry.parameter.requires_grad_(not frozen)
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
        if leaf == self._hold:
            self._held = self._part
            self._part.kept = [None] * len(self._entries)
        self._next += 1

    def part_ends(self) -> None:
        """Take the gradients of which fewer backward passes have come than the optimizer was told."""
        assert self._part is not None
        for place, passes in enumerate(self._part.passes):
            if passes < self._optimizer.backward_passes_per_step:
                self._take(place, self._part)
        if self._part.piece is not None and self._part.kept is None:
            self._new_sums()
        self._part = None

    def finish(self) -> None:
        """Wait for the other processes; then each parameter's gradient is that of the job.

        Raises:
            HorovodInternalError: a process was lost.
        """
        assert self._exchange is not None
        self._wait, self._exchange = self._exchange.finish, None
        self._optimizer.synchronize()  # which companions are told of
        self._optimizer._should_synchronize = False

    def abandon(self) -> None:
        """Forget a step that is under way, as after a fault."""
        if self._exchange is not None:
            self._exchange.abandon()
        self._exchange = self._part = self._wait = None
        self._held = self._hold = None
        self._finished = False
        self._sums = []

    # -- replays -----------------------------------------------------------------------------------------

    @property
    def entries(self) -> Sequence[Entry]:
        """The gradients that are summed."""
        return self._entries

    def hold(self, rank: int) -> None:
        """Keep the gradients of this process's last virtual rank in this step until `release`."""
        self._hold = rank

    @property
    def held(self) -> list[torch.Tensor | None]:
        """Those gradients, by entry; they may be replaced."""
        assert self._held is not None and self._held.kept is not None
        return self._held.kept

    def release(self) -> None:
        """Add up what was held."""
        part, gradients = self._held, self.held
        assert part is not None
        for place, gradient in enumerate(gradients):
            self._add_up(place, part, gradient)
        self._held = self._hold = None

    def replay_begins(self) -> None:
        """Begin backward passes whose gradients are only looked at."""
        self._part = _Part(range(0), None, [0] * len(self._entries))
        self._part.kept = [None] * len(self._entries)

    def replay_ends(self) -> list[torch.Tensor | None]:
        """Return their gradients, by entry."""
        part = self._part
        assert part is not None and part.kept is not None
        self.part_ends()
        return part.kept

    # -- inside ------------------------------------------------------------------------------------------

    def _require_known(self) -> None:
        """Refuse parameters that came after the optimizer was wrapped: nobody sums their gradients up."""
        for each in parameters_of(self._optimizer):
            if each.requires_grad and each not in self._known:
                raise ConfigError(
                    f"state.{self._name}",
                    f"a parameter of shape {tuple(each.shape)} was added, or has begun to require "
                    "gradients, after the state was made. Let all parameters require gradients when you make "
                    "the state, and freeze them afterwards",
                )

    def _way(self, layout: Sequence[Sequence[Node]], rank: int) -> Exchange:
        if len(layout) == 1:
            return Alone(self._entries)
        if sum(map(len, layout)) <= 2 and all(each.wire in SUMMED_BY_HOROVOD for each in self._entries):
            return Allreduced(self._entries)
        return Segments(self._entries, self._segments, layout, rank, self._prefix, self._buffers)

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
                f"{self._entries[place].of_user} has had more than "
                f"{declared} backward passes in one virtual rank's part of a step; "
                "tell DistributedOptimizer(backward_passes_per_step=…) how many there are",
            )
        if part.passes[place] == declared:
            self._take(place, part)

    def _take(self, place: int, part: _Part) -> None:
        entry = self._entries[place]
        if entry.parameter.grad is not None and part.leaf:
            self.looks(entry.parameter)
        gradient = self._leaf(entry)
        if part.kept is None:
            self._add_up(place, part, gradient)
        elif gradient is not None:
            part.kept[place] = gradient

    def _add_up(self, place: int, part: _Part, gradient: torch.Tensor | None) -> None:
        running = self._sums[place]
        running.push(part.leaf, gradient)
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
                    f"{entry.of_user} has a sparse gradient, which virtual ranks can't sum up; pass "
                    "DistributedOptimizer(sparse_as_dense=True), or make its layer with sparse=False",
                )
            gradient = gradient.to_dense()
        if gradient.stride() != parameter.stride():
            # The same in memory, whoever had it.
            gradient = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        return gradient.to(entry.wire)

    def _average(self) -> None:
        """In the place of Horovod's: called by `finish`; by a script that clips gradients, to no effect."""
        if self._wait is not None:
            self._wait()
            self._wait, self._finished = None, True
        self._require_finished()
        self._optimizer._synchronized = True

    def _applying(self) -> None:
        if not self._optimizer._should_synchronize:  # or else Horovod's `step` synchronizes
            self._require_finished()

    def _require_finished(self) -> None:
        """Refuse a step without gradients of the job."""
        if not self._finished:
            raise ConfigError(
                f"state.{self._name}",
                "stepped, or synchronized, without gradients of a whole step of all virtual ranks; do so "
                "after the inner loop has ended, without a break: for step in state.steps(loader): for part "
                "in step: …",
            )


class _Part:
    """The backward passes of one virtual rank.

    Args:
        leaf: the virtual rank; none if it is replayed.
        piece: the number of this process's subtree that ends with it, if one does.
        passes: that each entry has had.

    Attributes:
        kept: the gradients, by entry, if they are kept; None if they are summed up.
    """

    def __init__(self, leaf: Node, piece: int | None, passes: list[int]) -> None:
        self.leaf = leaf
        self.piece = piece
        self.passes = passes
        self.kept: list[torch.Tensor | None] | None = None


def _add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two partial sums, in the place of one; what is missing changes no number."""
    if left is None or right is None:
        return right if left is None else left
    return left.add_(right)
