"""The commit interval that loses least."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.elastic.durable.interval import CAP, Costs, Interval, best, daly, share_lost, young

MINUTE, HOUR = 60.0, 3600.0
SECONDS = st.floats(1e-6, 1e7)
CAPS = st.floats(1e-4, 0.5)


def relative_time(training, stall, mtbf):
    """Seconds that a second of training takes, by Daly's complete model without the time to restore."""
    return mtbf * math.expm1((training + stall) / mtbf) / training


@pytest.mark.parametrize(
    ("mtbf", "minutes", "rounded"), [(24 * HOUR, 117, 0.5), (6 * HOUR, 57, 0.5), (15 * MINUTE, 9.1, 0.05)]
)
def test_dalys_own_examples(mtbf, minutes, rounded):
    """Figures 3 to 5 of the paper: a dump of 5 minutes."""
    assert daly(5 * MINUTE, mtbf) / MINUTE == pytest.approx(minutes, abs=rounded)


@pytest.mark.parametrize(("stall", "mtbf", "seconds"), [(2.0, 100.0, 20.0), (0.0, 9.0, 0.0), (9.0, 0.0, 0.0)])
def test_youngs_formula(stall, mtbf, seconds):
    assert young(stall, mtbf) == seconds


@given(st.floats(1e-4, 0.2), SECONDS)
def test_no_other_interval_loses_much_less_than_dalys(ratio, mtbf):
    stall = 2 * ratio * mtbf
    there = relative_time(daly(stall, mtbf), stall, mtbf)
    others = daly(stall, mtbf) * np.geomspace(0.2, 5.0, 400)
    least = min(relative_time(other, stall, mtbf) for other in others)
    assert there - least <= 1e-3 * (least - 1)


@pytest.mark.parametrize("stall", [200.0, 201.0, 1e6, math.inf])
def test_where_a_stall_is_as_long_as_two_failures_are_apart_one_failure_is_the_interval(stall):
    assert daly(stall, 100.0) == 100.0


@pytest.mark.parametrize(
    ("stall", "mtbf", "least", "interval"),
    [
        (0.5, 24 * HOUR, 1.0, Interval(daly(0.5, 24 * HOUR) + 0.5, "optimum")),
        (40.0, 24 * HOUR, 1.0, Interval(4000.0, "cap")),
        (0.5, 24 * HOUR, 600.0, Interval(600.0, "least")),
        (0.0, 24 * HOUR, 7.0, Interval(7.0, "least")),
        (0.0, math.inf, 7.0, Interval(7.0, "least")),
        (0.0, math.inf, 0.0, Interval(0.0, "least")),
        (0.5, math.inf, 1.0, Interval(math.inf, "optimum")),
        (math.inf, 24 * HOUR, 1.0, Interval(math.inf, "optimum")),
        (0.5, 0.0, 1.0, Interval(50.0, "cap")),
        (0.5, HOUR, math.inf, Interval(math.inf, "least")),
    ],
)
def test_the_interval_that_loses_least(stall, mtbf, least, interval):
    assert best(Costs(stall, 3.0, mtbf), least=least) == interval


@given(SECONDS, SECONDS, SECONDS, SECONDS, CAPS)
def test_costlier_commits_are_made_more_rarely(stall, more, mtbf, least, cap):
    cheap, costly = Costs(stall, 0.0, mtbf), Costs(stall + more, 0.0, mtbf)
    there = best(costly, least=least, cap=cap).seconds
    assert best(cheap, least=least, cap=cap).seconds <= there * (1 + 1e-12)


@given(SECONDS, SECONDS, SECONDS, SECONDS, CAPS)
def test_jobs_that_fail_more_rarely_commit_more_rarely(stall, mtbf, more, least, cap):
    often, rarely = Costs(stall, 0.0, mtbf), Costs(stall, 0.0, mtbf + more)
    there = best(rarely, least=least, cap=cap).seconds
    assert best(often, least=least, cap=cap).seconds <= there * (1 + 1e-12)


@given(SECONDS, SECONDS, SECONDS, st.floats(1e-4, 0.99))
def test_neither_the_cap_nor_the_time_of_a_write_is_ever_passed_over(stall, mtbf, least, cap):
    interval = best(Costs(stall, 0.0, mtbf), least=least, cap=cap)
    assert interval.seconds >= least
    assert stall / interval.seconds <= cap * (1 + 1e-12)


@given(st.floats(1e-6, 1.0), st.floats(1e5, 1e7))
def test_a_little_more_or_less_than_the_optimum_loses_more_by_the_share_lost(stall, mtbf):
    costs = Costs(stall, 10.0, mtbf)
    there = share_lost(costs, young(stall, mtbf))
    assert all(share_lost(costs, young(stall, mtbf) * factor) > there for factor in (0.8, 1.25))


@pytest.mark.parametrize(
    ("costs", "interval", "share"),
    [
        (Costs(1.0, 30.0, 1000.0), 100.0, 0.01 + 0.08),
        (Costs(1.0, 30.0, math.inf), 100.0, 0.01),
        (Costs(1.0, 30.0, 0.0), 100.0, 1.0),
        (Costs(1.0, 30.0, 1000.0), math.inf, 1.0),
        (Costs(1.0, 30.0, math.inf), math.inf, 0.0),
    ],
)
def test_the_share_lost(costs, interval, share):
    assert share_lost(costs, interval) == pytest.approx(share)


@pytest.mark.parametrize("name", ["stall", "restore", "mtbf"])
@pytest.mark.parametrize("value", [-1.0, math.nan])
def test_costs_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=name):
        Costs(**{"stall": 1.0, "restore": 1.0, "mtbf": 1.0, name: value})


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"least": -1.0}, "least"),
        ({"least": math.nan}, "least"),
        ({"cap": 0.0}, "cap"),
        ({"cap": 1.0}, "cap"),
        ({"cap": math.nan}, "cap"),
    ],
)
def test_limits_that_cannot_be(limits, name):
    with pytest.raises(ValueError, match=name):
        best(Costs(1.0, 1.0, 1.0), **limits)


@pytest.mark.parametrize("interval", [0.0, -1.0, math.nan])
def test_an_interval_that_cannot_be(interval):
    with pytest.raises(ValueError, match="interval"):
        share_lost(Costs(1.0, 1.0, 1.0), interval)


def test_the_cap_is_one_percent():
    assert CAP == 0.01
