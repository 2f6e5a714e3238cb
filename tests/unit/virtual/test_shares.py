"""Dealing virtual ranks out."""

from __future__ import annotations

import itertools

import pytest

from hvdrecover.virtual.shares import by_speed, equal, reconsider, step_time


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
