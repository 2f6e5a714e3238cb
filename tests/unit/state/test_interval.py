"""The commit interval that loses least."""

import pytest

from hvdrecover.state.interval import best, cost_of_write

HOUR = 3600.0


@pytest.mark.parametrize(
    ("stall", "mtbf", "write", "interval"),
    [
        (0.5, 24 * HOUR, 0.5, 294.4),
        (300.0, 24 * HOUR, 300.0, 30000.0),
        (0.5, 24 * HOUR, 300.0, 600.0),
        (0.5, 0.0, 0.5, 50.0),
    ],
)
def test_the_interval_that_loses_least(stall, mtbf, write, interval):
    assert best(stall, mtbf, write) == pytest.approx(interval, abs=0.1)


@pytest.mark.parametrize(
    ("clean", "beside", "cost"),
    [([1.0] * 3, [2.0], 5.0), ([1.0] * 3, [1.0], 0.1), ([1.0] * 2, [2.0], 10.0), ([1.0] * 3, [], 10.0)],
)
def test_a_write_costs_the_share_by_which_training_is_slower_beside_it(clean, beside, cost):
    assert cost_of_write(clean, beside, 10.0) == pytest.approx(cost)
