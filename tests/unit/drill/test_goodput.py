"""The goodput that measured numbers mean: two formulas and a simulation."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill.goodput import Conditions, Simulated, exact, first_order, simulate

DAY = 86400.0
JOBS = {
    "few failures": Conditions(60.0, 0.5, 20.0, 1000 * DAY, 10_000),
    "many": Conditions(60.0, 0.5, 20.0, 30 * DAY, 10_000),
    "an interval rarely passes": Conditions(60.0, 5.0, 1.0, 30.0 * 64, 64),
    "a recovery rarely passes": Conditions(10.0, 1.0, 60.0, 30.0 * 64, 64),
    "one worker": Conditions(600.0, 30.0, 100.0, 3600.0, 1),
    "instant recovery": Conditions(60.0, 0.0, 0.0, 6000.0, 7),
}


def bound(conditions, failures, deviations=5.0):
    """How far a simulation of so many failures may be from the truth, by so many standard deviations.

    Goodput is a sum of useful times U over one of the times T between failures, so for n failures its
    variance is Var(U - goodput T) / (n M^2) (delta method). U - goodput T lies between -T and T, and E[T^2]
    = 2 M^2. The last interval may be cut off besides.
    """
    edge = (conditions.interval + conditions.recovery) / (failures * conditions.mtbf_job)
    return deviations * math.sqrt(2.0 / failures) + edge


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("failures", [10_000, 1_000_000])
def test_the_simulation_converges_to_the_full_formula(name, failures):
    job = JOBS[name]
    simulated = simulate(job, failures * job.mtbf_job, seed=7)
    assert abs(simulated.failures - failures) <= 5 * math.sqrt(failures)
    assert abs(simulated.goodput - exact(job)) <= bound(job, failures)


@pytest.mark.parametrize("name", JOBS)
def test_failures_during_recoveries_are_as_many_as_they_should_be(name):
    job, failures = JOBS[name], 1_000_000
    share = -math.expm1(-job.recovery / job.mtbf_job)
    simulated = simulate(job, failures * job.mtbf_job, seed=11)
    tolerance = 5 * math.sqrt(share * (1 - share) / failures) + 1 / failures
    assert simulated.interrupted / simulated.failures == pytest.approx(share, abs=tolerance)


def worker_by_worker(job, seconds, seed):
    """The same job, each worker with failures of its own, one event after the other."""
    random = np.random.default_rng(seed)
    upcoming = [(random.exponential(job.mtbf_worker), worker) for worker in range(job.workers)]
    heapq.heapify(upcoming)
    training_since = failures = 0.0
    useful = 0.0
    while upcoming[0][0] < seconds:
        now, worker = heapq.heappop(upcoming)
        heapq.heappush(upcoming, (now + random.exponential(job.mtbf_worker), worker))
        if now > training_since:
            useful += (now - training_since) // job.interval * (job.interval - job.stall)
        training_since, failures = now + job.recovery, failures + 1
    return Simulated(useful / seconds, int(failures), 0)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", ["an interval rarely passes", "a recovery rarely passes", "one worker"])
def test_one_process_of_failures_is_as_good_as_one_for_each_worker(name, seed):
    job, failures = JOBS[name], 20_000
    one_by_one = worker_by_worker(job, failures * job.mtbf_job, seed)
    at_once = simulate(job, failures * job.mtbf_job, seed)
    assert abs(one_by_one.failures - at_once.failures) <= 5 * math.sqrt(2 * failures)
    assert abs(one_by_one.goodput - at_once.goodput) <= math.sqrt(2) * bound(job, failures)


def test_where_failures_are_many_only_the_simple_formula_is_wrong():
    job = JOBS["an interval rarely passes"]
    simulated = simulate(job, 1_000_000 * job.mtbf_job, seed=3)
    assert first_order(job) == 0.0
    assert abs(simulated.goodput - exact(job)) <= bound(job, 1_000_000) < exact(job) / 5


@given(
    st.floats(1.0, 1e4),
    st.floats(0.0, 0.99),
    st.floats(0.0, 1e4),
    st.floats(1e2, 1e9),
    st.integers(1, 10_000),
)
def test_where_failures_are_rare_both_formulas_agree(interval, share, recovery, times, workers):
    mtbf_job = times * (interval + recovery)
    job = Conditions(interval, share * interval, recovery, mtbf_job * workers, workers)
    failing = (interval + recovery) / mtbf_job
    # What the first order leaves out: the stall's share times the failures', and the square of the latter.
    assert abs(first_order(job) - exact(job)) <= failing * (share + failing) + 1e-12


@given(
    st.floats(1.0, 1e6), st.floats(0.0, 0.99), st.floats(0.0, 1e6), st.floats(1e-3, 1e9), st.integers(1, 9)
)
def test_goodput_is_a_share_and_never_better_with_more_workers(interval, share, recovery, mtbf, workers):
    fewer = exact(Conditions(interval, share * interval, recovery, mtbf, workers))
    more = exact(Conditions(interval, share * interval, recovery, mtbf, workers + 1))
    assert 0.0 <= more <= fewer * (1 + 1e-9) <= 1.0 + 1e-9


def test_without_failures_all_but_the_stalls_counts():
    job = Conditions(10.0, 1.0, 5.0, math.inf, 10_000)
    assert exact(job) == first_order(job) == 0.9
    assert simulate(job, 1000.0, seed=1) == Simulated(0.9, 0, 0)
    assert simulate(job, 5.0, seed=1) == Simulated(1.0, 0, 0)  # not yet committed, and not lost
    assert simulate(job, 9.5, seed=1) == Simulated(9.0 / 9.5, 0, 0)


def test_a_seed_gives_one_result_and_another_gives_another():
    job = JOBS["many"]
    assert simulate(job, 7 * DAY, seed=1) == simulate(job, 7 * DAY, seed=1) != simulate(job, 7 * DAY, seed=2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": 0.0},
        {"interval": math.inf},
        {"interval": math.nan},
        {"stall": 60.0},
        {"stall": -1.0},
        {"stall": math.nan},
        {"recovery": -1.0},
        {"recovery": math.nan},
        {"recovery": math.inf},
        {"mtbf_worker": 0.0},
        {"mtbf_worker": math.nan},
        {"workers": 0},
    ],
)
def test_conditions_that_cannot_be(wrong):
    values = {"interval": 60.0, "stall": 0.5, "recovery": 20.0, "mtbf_worker": DAY, "workers": 8}
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Conditions(**{**values, **wrong})


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be(seconds):
    with pytest.raises(ValueError, match="seconds"):
        simulate(JOBS["many"], seconds, seed=1)
