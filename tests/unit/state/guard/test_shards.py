"""Shares of a data set that fit together, or don't."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from hvdrecover.data.order import Tail, share
from hvdrecover.errors import ShardsError
from hvdrecover.guard import structure
from tests.unit.state.jobs import Process, on_ranks


def check(mine: list[Any], batches: list[int], length: int | list[int]) -> list[str]:
    """Return what all ranks learn of their shares."""

    def body(process: Process) -> list[str]:
        rank = process.world.rank()
        samples = None if mine[rank] is None else np.array(mine[rank], dtype=np.int64)
        try:
            structure.check_shards(
                process.world, batches[rank], samples, length[rank] if isinstance(length, list) else length
            )
        except ShardsError as error:
            return error.differences
        return []

    results = on_ranks(len(mine), body)
    assert results == [results[0]] * len(mine)
    return results[0]


@pytest.mark.parametrize("tail", ["pad", "drop"])
@pytest.mark.parametrize("length", [0, 1, 8, 10])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_our_samplers_deal_out_fits(length: int, size: int, tail: Tail) -> None:
    mine = [share(np.arange(length), 0, rank, size, tail) for rank in range(size)]
    assert check(mine, [3] * size, length) == []


@pytest.mark.parametrize(
    ("mine", "batches", "length", "lines"),
    [
        (
            [None, None, None],
            [5, 4, 5],
            -1,
            ["batches: 5 on ranks 0, 2; 4 on rank 1; .* batch 4, ranks 0, 2 .* rank 1"],
        ),
        ([None, None], [5, 5], [100, 90], ["length .*: 100 on rank 0; 90 on rank 1"]),
        ([[0, 1], [2]], [1, 1], 3, ["samples: 2 on rank 0; 1 on rank 1"]),
        (
            [[0, 1, 2, 3]] * 2,
            [1, 1],
            8,
            [
                "overlap: 4 of 8 .*: 0, 1, 2, 3",
                "missing: 4 of 8 .*: 4, 5, 6, 7",
            ],
        ),
        ([[0, 1], [2, 9]], [1, 1], 4, ["numbers .* 4: 0 on rank 0; 1 on rank 1"]),
        ([[0, 1], [2, -1]], [1, 1], 4, ["numbers .* 4: 0 on rank 0; 1 on rank 1"]),
        (
            [list(range(10)), list(range(10, 20))],
            [2, 2],
            40,
            ["missing: 20 of 40 .*: 20, 21, 22, 23, 24, …"],
        ),
    ],
)
def test_what_does_not_fit_is_named(
    mine: list[Any], batches: list[int], length: int | list[int], lines: list[str]
) -> None:
    found = check(mine, batches, length)
    assert all(map(re.fullmatch, lines, found))
    assert len(found) == len(lines)
