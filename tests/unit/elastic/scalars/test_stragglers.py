from __future__ import annotations

import pytest

from hvdrecover.elastic.scalars.stragglers import shares


@pytest.mark.parametrize(
    ("busy", "expected"),
    [
        ([5], [1.0]),
        ([1, 4, 2], [0.25, 1.0, 0.5]),
        ([3, 3], [1.0, 1.0]),
        ([0, 3], None),
        ([0], None),
    ],
)
def test_shares_of_the_slowest(busy: list[int], expected: list[float] | None) -> None:
    assert shares(busy) == expected
