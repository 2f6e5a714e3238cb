"""The order in which what virtual ranks have computed is added up: a fixed binary tree.

Its leaves are the virtual ranks. A node of n leaves splits at the largest power of two below n, so it holds
the leaves from ``k * 2**level`` on, up to ``2**level`` of them. Rounding then depends on the number of leaves
alone, and not on which process adds what. Exact sums, of int64 or of two float32, would need no tree; they
took 2 to 6 times as long as Horovod's allreduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Generic, TypeVar

Value = TypeVar("Value")
Node = range
"""The leaves of a complete subtree."""


def subtrees(start: int, stop: int, size: int) -> list[Node]:
    """Return the maximal complete subtrees of some neighbouring leaves, from left to right.

    Args:
        start: the first leaf.
        stop: one more than the last; there are fewer than ``2 * log2(size) + 2`` subtrees.
        size: the number of leaves of the whole tree.
    """
    found = RunningSum[None](size, lambda left, right: None)
    for leaf in range(start, stop):
        found.push(range(leaf, leaf + 1), None)
    return found.nodes


def pieces(shares: Sequence[int]) -> list[list[Node]]:
    """Return the subtrees of each process.

    Args:
        shares: how many leaves each process has, in the order of the leaves; some may have none.
    """
    size = sum(shares)
    bounds = accumulate(shares, initial=0)
    return [subtrees(start, stop, size) for start, stop in pairwise(bounds)]


class RunningSum(Generic[Value]):
    """Sums of neighbouring nodes that come from left to right; two are added as soon as they make up a node.

    Args:
        size: the number of leaves of the whole tree.
        add: returns the sum of two values, the left one first; may change them.

    Attributes:
        nodes: the nodes that there are sums of, from left to right; at most ``log2(size) + 1`` if the first
            leaf is among them.
        values: their sums.
    """

    def __init__(self, size: int, add: Callable[[Value, Value], Value]) -> None:
        self._size = size
        self._add = add
        self.nodes: list[Node] = []
        self.values: list[Value] = []

    def push(self, node: Node, value: Value) -> None:
        """Take the next node, which begins where the last one ended."""
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
