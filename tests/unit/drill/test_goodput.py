"""The goodput that measured numbers mean: the formula, against simulations."""

import heapq
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.drill.goodput import Conditions, goodput

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
    """Return how far a simulation of so many failures may be from the truth, by so many standard deviations.

    Goodput is a sum of useful times U over one of the times T between failures, so for n failures its
    variance is Var(U - goodput T) / (n M^2) (delta method). U - goodput T lies between -T and T, and E[T^2]
    = 2 M^2. The last interval may be cut off besides.
    """
    edge = (conditions.interval + conditions.recovery) / (failures * conditions.mtbf_job)
    return deviations * math.sqrt(2.0 / failures) + edge


def at_once(job, seconds, seed):
    """Goodput of a job, and how many failures it had: those of all workers are one Poisson process."""
    random = np.random.default_rng(seed)
    failures = int(random.poisson(seconds / job.mtbf_job))
    gaps = np.diff(np.sort(random.uniform(0.0, seconds, failures)), prepend=0.0, append=seconds)
    recoveries = np.full(failures + 1, job.recovery)
    recoveries[0] = 0.0  # the job begins without one
    intervals = np.maximum(gaps - recoveries, 0.0) // job.interval
    return float(intervals.sum()) * (job.interval - job.stall) / seconds, failures


def worker_by_worker(job, seconds, seed):
    """The same job, each worker with failures of its own, one event after the other."""
    random = np.random.default_rng(seed)
    upcoming = [(random.exponential(job.mtbf_worker), worker) for worker in range(job.workers)]
    heapq.heapify(upcoming)
    training_since = failures = useful = 0.0
    while upcoming[0][0] < seconds:
        now, worker = heapq.heappop(upcoming)
        heapq.heappush(upcoming, (now + random.exponential(job.mtbf_worker), worker))
        if now > training_since:
            useful += (now - training_since) // job.interval * (job.interval - job.stall)
        training_since, failures = now + job.recovery, failures + 1
    return useful / seconds, int(failures)


@pytest.mark.parametrize("name", JOBS)
def test_a_long_simulation_has_the_goodput_of_the_formula(name):
    job, failures = JOBS[name], 1_000_000
    simulated, count = at_once(job, failures * job.mtbf_job, seed=7)
    assert abs(count - failures) <= 5 * math.sqrt(failures)
    assert abs(simulated - goodput(job)) <= bound(job, failures)


@pytest.mark.parametrize("name", ["an interval rarely passes", "a recovery rarely passes", "one worker"])
def test_so_has_one_in_which_each_worker_fails_by_itself(name):
    job, failures = JOBS[name], 20_000
    simulated, count = worker_by_worker(job, failures * job.mtbf_job, seed=1)
    assert abs(count - failures) <= 5 * math.sqrt(failures)
    assert abs(simulated - goodput(job)) <= bound(job, failures)


@given(
    st.floats(1.0, 1e6), st.floats(0.0, 0.99), st.floats(0.0, 1e6), st.floats(1e-3, 1e9), st.integers(1, 9)
)
def test_goodput_is_a_share_and_never_better_with_more_workers(interval, share, recovery, mtbf, workers):
    fewer = goodput(Conditions(interval, share * interval, recovery, mtbf, workers))
    more = goodput(Conditions(interval, share * interval, recovery, mtbf, workers + 1))
    assert 0.0 <= more <= fewer * (1 + 1e-9) <= 1.0 + 1e-9


def test_without_failures_all_but_the_stalls_counts():
    job = Conditions(10.0, 1.0, 5.0, math.inf, 10_000)
    assert goodput(job) == 0.9


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
