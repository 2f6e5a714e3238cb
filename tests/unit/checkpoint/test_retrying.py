"""The policy of retries: which errors, how often, with what pauses."""

import random
import threading

import pytest

from hvdrecover.checkpoint.retrying import ATTEMPTS, WokenError, retry_delay, retrying
from hvdrecover.errors import ConfigError, CorruptCheckpointError, FencedError, ForeignRootError, StorageError
from tests.fakes.clock import FakeClock


class Flaky:
    """Raises the errors of its plan, one per call, then returns its argument."""

    def __init__(self, *plan):
        self.plan = list(plan)
        self.calls = 0

    def __call__(self, argument=None):
        self.calls += 1
        if self.plan:
            raise self.plan.pop(0)
        return argument


def away(number=0):
    return StorageError("url", f"the storage is away ({number})")


def test_the_result_is_the_functions_own():
    clock = FakeClock()
    assert retrying(clock)(Flaky(away(), away()), 7) == 7
    assert len(clock.waits) == 2


def test_the_last_error_is_raised_after_a_handful_of_attempts():
    clock, flaky = FakeClock(), Flaky(*(away(number) for number in range(1, 100)))
    with pytest.raises(StorageError, match=rf"\({ATTEMPTS}\)"):
        retrying(clock)(flaky)
    assert (flaky.calls, len(clock.waits)) == (ATTEMPTS, ATTEMPTS - 1)


def test_without_a_limit_it_continues():
    clock, flaky = FakeClock(), Flaky(*(away() for _ in range(1000)))
    retrying(clock, attempts=None)(flaky)
    assert flaky.calls == 1001


def test_pauses_grow_up_to_a_cap_and_differ_between_jobs():
    runs = []
    for _ in range(20):
        clock = FakeClock()
        retrying(clock, attempts=None)(Flaky(*(away() for _ in range(12))))
        runs.append(clock.waits)
    for waits in runs:
        for attempt, wait in enumerate(waits, 1):
            assert retry_delay(attempt) / 2 <= wait <= retry_delay(attempt)
    assert all(len(set(waits)) == len(runs) for waits in zip(*runs, strict=True))


def test_the_users_random_stream_is_left_alone():
    before = random.getstate()
    retrying(FakeClock())(Flaky(away(), away()))
    assert random.getstate() == before


@pytest.mark.parametrize(
    "error",
    [
        FencedError("url", "replaced"),
        ForeignRootError("url", "a thesis"),
        ConfigError("checkpoint", "no such protocol"),
        CorruptCheckpointError("url", "truncated"),
        ZeroDivisionError("odd"),
    ],
)
def test_what_time_cannot_mend_is_raised_at_once(error):
    clock = FakeClock()
    with pytest.raises(type(error)):
        retrying(clock)(Flaky(error))
    assert clock.waits == []


def test_a_pause_that_is_cut_short_ends_the_retries():
    wake, flaky = threading.Event(), Flaky(away(), away())
    wake.set()
    with pytest.raises(WokenError):
        retrying(FakeClock(), wake=wake)(flaky)
    assert flaky.calls == 1
