"""The commit interval that loses least."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.state.interval import best, daly

MINUTE, HOUR = 60.0, 3600.0
SECONDS = st.floats(1e-6, 1e7)


def relative_time(training, stall, mtbf):
    """Seconds that a second of training takes, by Daly's complete model without the time to restore."""
    return mtbf * math.expm1((training + stall) / mtbf) / training


@pytest.mark.parametrize(
    ("mtbf", "minutes", "rounded"), [(24 * HOUR, 117, 0.5), (6 * HOUR, 57, 0.5), (15 * MINUTE, 9.1, 0.05)]
)
def test_dalys_own_examples(mtbf, minutes, rounded):
    """Figures 3 to 5 of the paper: a dump of 5 minutes."""
    assert daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, abs=rounded)


@given(st.floats(1e-4, 0.2), SECONDS)
def test_no_other_interval_loses_much_less_than_dalys(ratio, mtbf):
    stall = 2 * ratio * mtbf
    there = relative_time(daly(stall, mtbf), stall, mtbf)
    others = daly(stall, mtbf) * np.geomspace(0.2, 5.0, 400)
    least = min(relative_time(other, stall, mtbf) for other in others)
    assert there - least <= 1e-3 * (least - 1)


@pytest.mark.parametrize(
    ("stall", "mtbf", "least", "interval"),
    [
        (0.5, 24 * HOUR, 1.0, (daly(0.5, 24 * HOUR) + 0.5, "optimum")),
        (40.0, 24 * HOUR, 1.0, (4000.0, "cap")),
        (0.5, 24 * HOUR, 600.0, (600.0, "least")),
        (0.0, 24 * HOUR, 7.0, (7.0, "least")),
        (0.0, math.inf, 7.0, (7.0, "least")),
        (0.0, math.inf, 0.0, (0.0, "least")),
        (0.5, math.inf, 1.0, (math.inf, "optimum")),
        (math.inf, 24 * HOUR, 1.0, (math.inf, "optimum")),
        (0.5, 0.0, 1.0, (50.0, "cap")),
        (0.5, HOUR, math.inf, (math.inf, "least")),
    ],
)
def test_the_interval_that_loses_least(stall, mtbf, least, interval):
    assert best(stall, mtbf, least=least) == interval
