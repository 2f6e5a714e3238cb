import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.elastic.virtual.tree import RunningSum, pieces, subtrees


def bracketed(start, stop):
    """The tree, by its definition."""
    count = stop - start
    if count == 1:
        return start
    half = 1 << (count - 1).bit_length() - 1
    return (bracketed(start, start + half), bracketed(start + half, stop))


def nodes(start, stop):
    found = [(start, stop)]
    if stop - start > 1:
        half = 1 << (stop - start - 1).bit_length() - 1
        found += nodes(start, start + half) + nodes(start + half, stop)
    return found


def running(size, add=lambda left, right: (left, right)):
    return RunningSum(size, add)


def carried_out(shares):
    """Each process sums its own leaves; then the pieces are summed, as they come from all of them."""
    size, start, whole = sum(shares), 0, running(sum(shares))
    for share, mine in zip(shares, pieces(shares), strict=True):
        own = running(size)
        for leaf in range(start, start + share):
            own.push(range(leaf, leaf + 1), leaf)
        assert own.nodes == mine
        for node, value in zip(own.nodes, own.values, strict=True):
            whole.push(node, value)
        start += share
    assert whole.nodes == [range(size)]
    return whole.values[0]


def partitions(size):
    for count in range(size):
        for cuts in itertools.combinations(range(1, size), count):
            yield [stop - start for start, stop in itertools.pairwise((0, *cuts, size))]


@pytest.mark.parametrize("size", range(1, 18))
def test_subtrees_are_the_maximal_nodes_within_the_range(size):
    every = nodes(0, size)
    for start, stop in itertools.combinations(range(size + 1), 2):
        inside = [(a, b) for a, b in every if start <= a and b <= stop]
        maximal = [
            (a, b) for a, b in inside if not any(c <= a and b <= d and (a, b) != (c, d) for c, d in inside)
        ]
        assert [(each.start, each.stop) for each in subtrees(start, stop, size)] == sorted(maximal)


@pytest.mark.parametrize("size", range(1, 18))
def test_two_processes_bracket_as_one(size):
    expected = bracketed(0, size)
    for first in range(size + 1):
        assert carried_out([first, size - first]) == expected


@pytest.mark.parametrize("size", range(1, 11))
def test_all_partitions_bracket_alike(size):
    expected = bracketed(0, size)
    for shares in partitions(size):
        assert carried_out(shares) == expected
        assert carried_out([0, *shares, 0]) == expected


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any))
def test_any_shares_bracket_alike(shares):
    assert carried_out(shares) == bracketed(0, sum(shares))


@pytest.mark.parametrize("size", range(1, 70))
def test_few_sums_are_alive(size):
    own = running(size)
    for leaf in range(size):
        own.push(range(leaf, leaf + 1), leaf)
        assert len(own.nodes) <= math.log2(size) + 1
    for start, stop in itertools.combinations(range(size + 1), 2):
        assert len(subtrees(start, stop, size)) < 2 * math.log2(size) + 2


@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_no_worse_than_one_after_the_other(size):
    random = np.random.default_rng(size)
    leaves = (random.normal(size=(size, 10_000)) * 10.0 ** random.integers(-12, 12, 10_000)).astype(
        np.float32
    )
    own = running(size, np.add)
    plain = np.zeros_like(leaves[0])
    for leaf in range(size):
        own.push(range(leaf, leaf + 1), leaves[leaf])
        plain = plain + leaves[leaf]
    exact, scale = leaves.astype(np.float64).sum(0), np.abs(leaves).max(0)
    errors = [np.sqrt(np.mean(((each - exact) / scale) ** 2)) for each in (own.values[0], plain)]
    assert errors[0] <= errors[1]
