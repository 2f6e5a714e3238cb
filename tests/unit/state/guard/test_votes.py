from __future__ import annotations

import pytest

from hvdrecover.guard.comparison import Vote, named, vote


@pytest.mark.parametrize(
    ("ballots", "right", "wrong", "tied"),
    [
        ("aaaa", (0, 1, 2, 3), (), False),
        ("a", (0,), (), False),
        ("ab", (0,), (1,), True),
        ("abb", (1, 2), (0,), False),
        ("aab", (0, 1), (2,), False),
        ("abc", (0,), (1, 2), True),
        ("abab", (0, 2), (1, 3), True),
        ("abbcc", (1, 2), (0, 3, 4), True),
        ("abbbcc", (1, 2, 3), (0, 4, 5), False),
    ],
)
def test_the_largest_party_is_right(
    ballots: str, right: tuple[int, ...], wrong: tuple[int, ...], tied: bool
) -> None:
    assert vote(list(ballots)) == Vote(right, wrong, tied)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([1], "rank 1"), ([0, 1], "ranks 0-1"), ([5, 0, 1, 2], "ranks 0-2, 5"), ([7, 3], "ranks 3, 7")],
)
def test_ranks_are_named_in_runs(ranks: list[int], text: str) -> None:
    assert named(ranks) == text
