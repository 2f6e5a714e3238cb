from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvdrecover.config import LEAST_TIMEOUT, Config, read
from hvdrecover.heartbeat import Phase
from hvdrecover.launch import hangs, waits
from tests.unit.launch.readings import reading


def limits(startup: float, timeout: float | None = None) -> Config:
    return replace(read({}), hang_timeout=timeout, startup_timeout=startup)


SHORT, LONG = limits(timeout=20.0, startup=600.0), limits(timeout=900.0, startup=600.0)
ADAPTIVE = limits(startup=600.0)


@pytest.mark.parametrize(
    ("phase", "limits", "seconds"),
    [
        (Phase.TRAINING, SHORT, 20.0),
        (Phase.TRAINING, LONG, 900.0),
        (Phase.TRAINING, ADAPTIVE, 300.0),
        (Phase.STARTING, ADAPTIVE, 600.0),
        (Phase.BEGINNING, SHORT, 600.0),
        (Phase.RECOVERING, LONG, 900.0),
        (Phase.UNKNOWN, SHORT, 600.0),
        (Phase.LEFT, SHORT, 20.0),
        (Phase.REMOVED, ADAPTIVE, 300.0),
    ],
)
def test_a_limit_for_each_phase(phase: Phase, limits: Config, seconds: float) -> None:
    assert hangs.limit(reading(phase), limits) == seconds


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("limits", [SHORT, ADAPTIVE])
def test_every_phase_has_a_deadline(phase: Phase, limits: Config) -> None:
    assert 0 < hangs.limit(reading(phase, steps=1), limits) <= 86400


def test_every_wait_of_guardians_and_supervisors_is_over_within_a_minute() -> None:
    deadlines = [value for value in vars(waits).values() if isinstance(value, float)]
    assert len(deadlines) > 15 and all(0 < seconds <= 60 for seconds in deadlines)


def test_a_script_that_never_imports_hvdrecover_is_not_judged() -> None:
    assert hangs.limit(reading(Phase.UNKNOWN), SHORT, joins=False) == math.inf
    assert hangs.limit(reading(Phase.UNKNOWN), SHORT, joins=True) == 600.0


@pytest.mark.parametrize(
    ("longest", "seconds"), [(0.0, 300.0), (60.0, 300.0), (60.1, 300.5), (1000.0, 5000.0)]
)
def test_without_a_timeout_it_is_a_multiple_of_the_longest_that_was_seen(
    longest: float, seconds: float
) -> None:
    assert hangs.limit(reading(longest=longest), ADAPTIVE) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("limits", "longest", "seconds"),
    [
        (SHORT, 0.1, 20.0),
        (SHORT, 30.0, 150.0),
        (SHORT, 500.0, 2500.0),  # what is known counts for more than what is assumed
        (LONG, 30.0, 900.0),
        (ADAPTIVE, 70.0, 350.0),
    ],
)
def test_a_beginning_is_judged_by_the_longest_silence_so_far(
    limits: Config, longest: float, seconds: float
) -> None:
    begins = reading(Phase.BEGINNING, longest=longest)
    assert hangs.limit(begins, limits) == seconds
    assert hangs.limit(replace(begins, waiting=True), limits) == max(
        limits.startup_timeout, limits.hang_timeout or 0
    )
    assert hangs.limit(replace(begins, phase=Phase.TRAINING), limits) == hangs.training_limit(longest, limits)


@pytest.mark.parametrize("timeout", [LEAST_TIMEOUT, 5.5, 6, 7, 7.9, 8, 10, 15, 16, 30, 300, 86400])
def test_waiting_ranks_are_free_before_they_would_count_as_hanging(timeout: float) -> None:
    stall, check = hangs.stall_seconds(timeout), hangs.check_seconds(timeout)
    assert stall >= 1 and check >= 1  # to Horovod, 0 is never
    assert stall + 2 * check < timeout  # a tensor in Horovod's cache takes up to two looks longer
    assert hangs.collective_seconds(timeout, 10) < timeout


def test_a_plain_script_may_evaluate_for_an_hour_and_has_no_limit_without_steps() -> None:
    plain = reading(Phase.PLAIN, steps=3, longest=10.0)
    assert hangs.limit(plain, SHORT) == SHORT.hang_timeout
    assert hangs.limit(plain, ADAPTIVE) == ADAPTIVE.startup_timeout
    assert hangs.limit(reading(Phase.PLAIN), SHORT) == math.inf
