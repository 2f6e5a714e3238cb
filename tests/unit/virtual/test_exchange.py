"""Sums in the order of the tree, between processes; and the shares of virtual ranks."""

import functools
import itertools
import operator
import pickle

import numpy as np
import pytest

from hvdrecover.virtual.exchange import NOTHING, RunningSum, add_up, side_by_side
from hvdrecover.virtual.ranks import by_speed, equal, reconsider, step_time
from tests.fakes.world import FakeJob


def partitions(size):
    for count in range(size):
        for cuts in itertools.combinations(range(1, size), count):
            yield [stop - start for start, stop in itertools.pairwise((0, *cuts, size))]


class Collectives:
    """Horovod's collectives among threads; two float32 are added up as numpy does."""

    exact = (np.float32,)

    def __init__(self, world):
        self._world = world

    def allreduce(self, flat, name):
        rows = self._gathered(flat, name)
        return lambda: functools.reduce(operator.add, rows)

    def alltoall(self, flat, counts, name):
        bounds = np.cumsum([0, *counts])
        rows = self._gathered((flat, bounds), name)
        rank = self._world.rank()
        return lambda: np.concatenate([flat[bounds[rank] : bounds[rank + 1]] for flat, bounds in rows])

    def allgather(self, flat, name):
        rows = self._gathered(flat, name)
        return lambda: np.concatenate(rows)

    def _gathered(self, value, name):
        return [pickle.loads(bytes(row)) for row in self._world.gather(pickle.dumps(value), name)]


LENGTHS = (5, 1, 17)


def leaf(rank, bucket, dtype):
    random = np.random.default_rng([rank, bucket])
    return (random.normal(size=LENGTHS[bucket]) * 10.0 ** random.integers(-4, 4, LENGTHS[bucket])).astype(
        dtype
    )


def exchanged(shares, dtype):
    """The sums of each process."""

    def process(world):
        world.init()
        rank = world.rank()
        start = sum(shares[:rank])
        additions = []
        for kind in range(len(LENGTHS)):
            sums = RunningSum(sum(shares))
            for leaf_rank in range(start, start + shares[rank]):
                sums.push(range(leaf_rank, leaf_rank + 1), leaf(leaf_rank, kind, dtype))
            partial = sums.values or [np.full(LENGTHS[kind], NOTHING, dtype)]
            additions.append(add_up(Collectives(world), f"sums.{kind}", shares, rank, partial))
        return [total.tobytes() for total in side_by_side(additions)]

    return FakeJob(process, len(shares)).results()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_all_processes_have_the_bits_of_one_whatever_the_shares(size, dtype):
    (expected,) = exchanged([size], dtype)
    for shares in [*partitions(size)][:40]:
        for also in ([*shares], [0, *shares], [*shares, 0]):
            assert exchanged(also, dtype) == [expected] * len(also)


@pytest.mark.parametrize(
    ("size", "processes", "counts"),
    [(8, 4, (2, 2, 2, 2)), (8, 3, (3, 3, 2)), (4, 1, (4,)), (2, 4, (1, 1, 0, 0)), (1, 1, (1,))],
)
def test_equal_shares(size: int, processes: int, counts: tuple[int, ...]) -> None:
    assert equal(size, processes) == counts


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 4.0, 2.0), (0.3, 0.7, 5.0), (1.0, None, 3.0)])
def test_no_shares_have_a_step_end_earlier(size: int, seconds: tuple[float | None, ...]) -> None:
    known = [each if each is not None else 2.0 for each in seconds]  # the mean of 1 and 3
    best = min(
        step_time(counts, known)
        for counts in itertools.product(range(size + 1), repeat=3)
        if sum(counts) == size
    )
    assert step_time(by_speed(size, seconds), known) == best
    assert sum(by_speed(size, seconds)) == size


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [
        ((1.0, 1.0), (5, 5)),
        ((1.0, 1.15), (5, 5)),  # 6 + 4 would save less than a tenth
        ((1.0, 4.0), (8, 2)),
        ((None, 4.0), (5, 5)),  # not measured yet
    ],
)
def test_shares_change_if_that_saves_a_tenth_of_a_step(
    seconds: tuple[float | None, ...], counts: tuple[int, ...]
) -> None:
    assert reconsider((5, 5), seconds) == counts
    assert reconsider(counts, seconds) == counts


def test_a_process_with_nothing_to_do_need_not_be_measured() -> None:
    assert reconsider((4, 0), (1.0, None)) == (2, 2)
    assert reconsider((4, 0), (1.0, 5.0)) == (4, 0)
