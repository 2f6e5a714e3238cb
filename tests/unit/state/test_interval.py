"""The commit interval that loses least."""

import pytest

from hvdrecover.state.interval import best

HOUR = 3600.0


@pytest.mark.parametrize(
    ("stall", "mtbf", "least", "interval"),
    [
        (0.5, 24 * HOUR, 1.0, (pytest.approx(294.4, abs=0.1), "optimum")),
        (300.0, 24 * HOUR, 1.0, (30000.0, "cap")),
        (0.5, 24 * HOUR, 600.0, (600.0, "least")),
        (0.0, 24 * HOUR, 7.0, (7.0, "least")),
        (0.5, 0.0, 1.0, (50.0, "cap")),
    ],
)
def test_the_interval_that_loses_least(stall, mtbf, least, interval):
    assert best(stall, mtbf, least=least) == interval
