"""Adds up the gradients of all virtual ranks in one fixed order.

The order is a binary tree whose leaves are the virtual ranks. A node of n leaves splits at the largest power
of two below n. So rounding depends on the number of virtual ranks alone, not on which process adds what.
Exact sums (int64, or two float32) would need no tree, but took 2 to 6 times as long as Horovod's allreduce.

In a step, for each bucket of gradients:

1. Each process adds up its virtual ranks as far as the tree allows: one partial sum for each full subtree.
2. A single process has the result. If there are two partial sums, Horovod's allreduce adds them, because
   x + y is y + x.
3. Otherwise ``alltoall`` gives each process its slice of all partial sums. The process adds the slices up in
   the order of the tree, and ``allgather`` gives all processes the result. With one subtree for each process,
   this sends as many bytes as a ring allreduce.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, Protocol, TypeVar

NOTHING = -0.0
"""Stands for a missing gradient: adding it changes no number, not even the sign of a zero."""
BUCKET = 16 << 20
"""Bytes. Of 4, 8, 16 and 32 MiB the fastest with three processes, and as fast as 8 with four."""

Value = TypeVar("Value")
Node = range
"""The leaves of a complete subtree."""
Flat = Any
"""A one-dimensional tensor of a framework: it has ``dtype``, ``len``, slices and ``+=``."""


# -- the tree ------------------------------------------------------------------------------------------------


class RunningSum(Generic[Value]):
    """Sums of neighbouring nodes that come from left to right. Two are added as soon as they form a node.

    ``size`` is the number of leaves of the whole tree. ``add`` may change its values.
    """

    def __init__(self, size: int, add: Callable[[Value, Value], Value] = operator.iadd) -> None:
        self._size = size
        self._add = add
        self.nodes: list[Node] = []  # whose sums are known, from left to right
        self.values: list[Value] = []  # these sums

    def push(self, node: Node, value: Value) -> None:
        """Take the next node. It begins where the last one ended."""
        nodes, values = self.nodes, self.values
        while nodes and self._are_siblings(nodes[-1], node):
            node = range(nodes.pop().start, node.stop)
            value = self._add(values.pop(), value)
        nodes.append(node)
        values.append(value)

    def _are_siblings(self, left: Node, right: Node) -> bool:
        # A left child has 2**level leaves; only its parent is cut off at the end of the tree.
        width = 2 * len(left)
        return left.start % width == 0 and right.stop == min(left.start + width, self._size)


def pieces(shares: Sequence[int]) -> list[list[Node]]:
    """Return the maximal complete subtrees of each process, by the number of its leaves."""
    found = []
    for start, stop in pairwise(accumulate(shares, initial=0)):
        running = RunningSum[None](sum(shares), lambda left, right: None)
        for leaf in range(start, stop):
            running.push(range(leaf, leaf + 1), None)
        found.append(running.nodes)
    return found


def buckets(kinds: Sequence[Hashable], nbytes: Sequence[int]) -> list[list[int]]:
    """Group tensors into buckets that are sent at once; return the tensors' numbers.

    A bucket holds tensors of one kind. It holds at most `BUCKET` bytes, or one tensor. The last tensors come
    first, because backward passes make their gradients first.
    """
    found: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for number in reversed(range(len(kinds))):
        bucket, filled = filling.get(kinds[number], ([], 0))
        if not bucket or filled + nbytes[number] > BUCKET:
            bucket, filled = [], 0
            found.append(bucket)
        bucket.append(number)
        filling[kinds[number]] = bucket, filled + nbytes[number]
    return found


# -- between processes ---------------------------------------------------------------------------------------


class Pending(Protocol):
    """A collective that has begun."""

    def wait(self) -> Flat:
        """Return the result. Raises a framework's error if a process was lost."""


class Done:
    """A result that is there already."""

    def __init__(self, flat: Flat) -> None:
        self._flat = flat

    def wait(self) -> Flat:
        """Return the result."""
        return self._flat


class Collectives(Protocol):
    """Horovod's collectives on flat tensors of one framework.

    Attributes:
        exact: the dtypes whose sum of two Horovod rounds as the framework does.
    """

    exact: Collection[Any]

    def allreduce(self, flat: Flat, name: str) -> Pending:
        """Begin to add up a tensor over the processes. It may be overwritten."""

    def alltoall(self, flat: Flat, counts: Sequence[int], name: str) -> Pending:
        """Begin to send so many elements to each process."""

    def allgather(self, flat: Flat, name: str) -> Pending:
        """Begin to join the tensors of all processes."""

    def joined(self, flats: Sequence[Flat]) -> Flat:
        """Return tensors one after the other in one."""


class Exchange:
    """The sums of one step.

    Every process calls `add` for each bucket and each of its virtual ranks, and then `finish`.

    Args:
        collectives: of the framework.
        name: begins the names of collectives.
        shares: number of virtual ranks of each process.
        process: this process.
        count: number of buckets.
        add: returns the sum of two virtual ranks' gradients of a bucket. It may change them.
        pack: returns such gradients, by the bucket and the number of the partial sum, as a flat tensor. None
            stands for a process without virtual ranks, which sends a tensor full of `NOTHING`.
    """

    def __init__(
        self,
        collectives: Collectives,
        name: str,
        shares: Sequence[int],
        process: int,
        count: int,
        add: Callable[[Any, Any], Any],
        pack: Callable[[int, int, Any], Flat],
    ) -> None:
        self._collectives = collectives
        self._name = name
        self._processes = len(shares)
        self._size = sum(shares)
        self._nodes = [node for each in pieces(shares) for node in each]
        self._last = sum(shares[: process + 1]) - 1  # virtual rank of this process
        self._pack = pack
        self._sums = [RunningSum[Any](self._size, add) for _ in range(count)]
        self._scattered: dict[int, Pending] = {}
        self._totals: dict[int, Pending] = {}

    def add(self, bucket: int, rank: int, gradients: Any) -> None:
        """Add the gradients of a virtual rank, which belong to this exchange from now on.

        The virtual ranks come in their order. With the last one, the sums of the bucket are sent.
        """
        self._sums[bucket].push(range(rank, rank + 1), gradients)
        if rank == self._last:
            self._send(bucket)

    def finish(self) -> list[Any]:
        """Return the sum of all virtual ranks, by bucket: flat, or with a single process not packed."""
        for bucket, sums in enumerate(self._sums):
            if not sums.values:  # this process has no virtual rank
                self._send(bucket)
        for bucket, pending in self._scattered.items():
            received = pending.wait()
            count = len(received) // len(self._nodes)
            total = RunningSum[Flat](self._size)
            for number, node in enumerate(self._nodes):
                total.push(node, received[number * count : (number + 1) * count])
            name = f"{self._name}.{bucket}.gather"
            self._totals[bucket] = self._collectives.allgather(total.values[0], name)
        return [self._totals[bucket].wait() for bucket in range(len(self._sums))]

    def _send(self, bucket: int) -> None:
        mine, name = self._sums[bucket].values, f"{self._name}.{bucket}"
        if self._processes == 1:
            self._totals[bucket] = Done(mine[0])
            return
        flats = [self._pack(bucket, number, each) for number, each in enumerate(mine or [None])]
        flat = flats[0]
        if len(self._nodes) <= 2 and flat.dtype in self._collectives.exact:
            self._totals[bucket] = self._collectives.allreduce(flat, name)
        else:
            share = -(-len(flat) // self._processes)
            bounds = [min(len(flat), share * process) for process in range(self._processes + 1)]
            if len(mine) != 1:
                slices = [each[start:stop] for start, stop in pairwise(bounds) for each in flats]
                flat = self._collectives.joined(slices) if mine else flat[:0]
            counts = [(stop - start) * len(mine) for start, stop in pairwise(bounds)]
            self._scattered[bucket] = self._collectives.alltoall(flat, counts, f"{name}.scatter")
