"""Adds up the gradients of all virtual ranks in one fixed order.

The order is a binary tree whose leaves are the virtual ranks. A node of n leaves splits at the largest power
of two below n. So rounding depends on the number of virtual ranks alone, not on which process adds what.
Exact sums (int64, or two float32) would need no tree, but took 2 to 6 times as long as Horovod's allreduce.

1. During a step each process adds up its virtual ranks as far as the tree allows (`RunningSum`): one partial
   sum for each full subtree.
2. At the end of the step (`add_up`), a single process has the result. If there are two partial sums,
   Horovod's allreduce adds them, because x + y is y + x.
3. Otherwise ``alltoall`` gives each process its slice of all partial sums. The process adds the slices up in
   the order of the tree, and ``allgather`` gives all processes the result. With one subtree for each process,
   this sends as many bytes as a ring allreduce.
4. Gradients come in buckets. While one bucket is sent, the process copies or adds up another
   (`side_by_side`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, Protocol, TypeVar

NOTHING = -0.0
"""Stands for a missing gradient: adding it changes no number, not even the sign of a zero."""
BUCKET = 16 << 20
"""Bytes. The memory of larger tensors is given back to the system, and new pages cost more than sending."""

Value = TypeVar("Value")
Node = range
"""The leaves of a complete subtree."""
Flat = Any
"""A one-dimensional tensor of a framework: it has ``dtype``, ``len``, slices and ``+=``."""


class RunningSum(Generic[Value]):
    """Sums of neighbouring nodes that come from left to right. Two are added as soon as they form a node."""

    def __init__(self, size: int, add: Callable[[Value, Value], Value] = operator.iadd) -> None:
        self._size = size  # leaves of the whole tree
        self._add = add  # may overwrite its arguments
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


@functools.lru_cache(maxsize=4)  # each bucket of each step asks
def pieces(shares: tuple[int, ...]) -> list[list[Node]]:
    """Return the maximal complete subtrees of each process, by the number of its leaves."""
    found = []
    for start, stop in pairwise(accumulate(shares, initial=0)):
        running = RunningSum[None](sum(shares), lambda *_: None)
        for leaf in range(start, stop):
            running.push(range(leaf, leaf + 1), None)
        found.append(running.nodes)
    return found


def buckets(kinds: Sequence[Hashable], nbytes: Sequence[int]) -> list[list[int]]:
    """Group tensors of one kind into buckets that are sent at once; return the places of their tensors."""
    found: list[list[int]] = []
    last: dict[Hashable, tuple[list[int], int]] = {}  # the bucket that is being filled, and its bytes
    for place, (kind, size) in enumerate(zip(kinds, nbytes, strict=True)):
        if kind not in last or last[kind][1] + size > BUCKET:
            last[kind] = [], 0
            found.append(last[kind][0])
        bucket, filled = last[kind]
        bucket.append(place)
        last[kind] = bucket, filled + size
    return found


class Collectives(Protocol):
    """Horovod's collectives on flat tensors of one framework.

    Each begins at once, and returns a function that waits for the result. That raises Horovod's error if a
    process was lost.
    """

    exact: Collection[Any]  # the dtypes whose sum of two Horovod rounds as the framework does

    def allreduce(self, flat: Flat, name: str) -> Callable[[], Flat]:
        """Add up a tensor over the processes. It may be overwritten."""

    def alltoall(self, flat: Flat, counts: Sequence[int], name: str) -> Callable[[], Flat]:
        """Send so many elements to each process; return those received."""

    def allgather(self, flat: Flat, name: str) -> Callable[[], Flat]: ...


def add_up(
    collectives: Collectives, name: str, shares: Sequence[int], process: int, partial: Sequence[Flat]
) -> Generator[None, None, Flat]:
    """Return the sum of all virtual ranks, from the partial sums of all processes; yield while it is sent."""
    # A process without virtual ranks gives one tensor full of `NOTHING`.
    flat = partial[0]
    if len(shares) == 1:
        return flat
    parts = pieces(tuple(shares))
    if sum(map(len, parts)) <= 2 and flat.dtype in collectives.exact:
        reduced = collectives.allreduce(flat, name)
        yield
        return reduced()
    length = -(-len(flat) // len(shares))
    bounds = [min(len(flat), length * each) for each in range(len(shares) + 1)]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    scattered = []
    for number in range(max(map(len, parts))):  # as many calls on each process; it may have nothing to send
        has = number < len(parts[process])
        scattered.append(
            collectives.alltoall(
                partial[number] if has else flat[:0],
                sizes if has else [0] * len(sizes),
                f"{name}.{number}.scatter",
            )
        )
    yield
    received, mine = [each() for each in scattered], sizes[process]
    total = RunningSum[Flat](sum(shares))
    taken = [0] * len(received)  # elements
    for each in parts:
        for number, node in enumerate(each):
            total.push(node, received[number][taken[number] : taken[number] + mine])
            taken[number] += mine
    gathered = collectives.allgather(total.values[0], f"{name}.gather")
    yield
    return gathered()


def side_by_side(additions: Iterable[Generator[None, None, Flat]]) -> list[Flat]:
    """Return the results of `add_up` of all buckets; the order of buckets is the same on all processes."""
    totals: dict[int, Flat] = {}

    def sends(number: int, addition: Generator[None, None, Flat]) -> bool:
        """Continue until the addition has begun to send something; False if it has ended."""
        try:
            next(addition)
        except StopIteration as end:
            totals[number] = end.value
            return False
        return True

    under_way = [bucket for bucket in enumerate(additions) if sends(*bucket)]
    while under_way:
        under_way = [bucket for bucket in under_way if sends(*bucket)]
    return [totals[number] for number in sorted(totals)]
