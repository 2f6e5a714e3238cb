from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvdrecover.config import LEAST_TIMEOUT, Config, read
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import waits
from hvdrecover.launch.horovodrun import settings


def limits(timeout: float | None = None) -> Config:
    return replace(read({}), hang_timeout=timeout, startup_timeout=600.0)


SHORT, LONG, ADAPTIVE = limits(20.0), limits(900.0), limits()


@pytest.mark.parametrize(
    ("reading", "limits", "seconds"),
    [
        (Reading(Phase.TRAINING), SHORT, 20.0),
        (Reading(Phase.TRAINING), LONG, 900.0),
        (Reading(Phase.TRAINING), ADAPTIVE, 300.0),
        (Reading(Phase.TRAINING, longest=60.0), ADAPTIVE, 300.0),
        (Reading(Phase.TRAINING, longest=1000.0), ADAPTIVE, 5000.0),  # a multiple of the longest so far
        (Reading(Phase.STARTING), ADAPTIVE, 600.0),
        (Reading(Phase.RECOVERING), LONG, 900.0),
        (Reading(Phase.UNKNOWN), SHORT, 600.0),
        (Reading(Phase.LEFT), SHORT, 20.0),
        (Reading(Phase.REMOVED), ADAPTIVE, 300.0),
        (Reading(Phase.BEGINNING), SHORT, 600.0),
        (Reading(Phase.BEGINNING, longest=0.1), SHORT, 20.0),
        (Reading(Phase.BEGINNING, longest=500.0), SHORT, 2500.0),  # what is known counts, not what is assumed
        (Reading(Phase.BEGINNING, longest=500.0, waiting=True), SHORT, 600.0),
        (Reading(Phase.BEGINNING, longest=70.0), ADAPTIVE, 350.0),
        (Reading(Phase.PLAIN, steps=3, longest=10.0), SHORT, 20.0),
        (Reading(Phase.PLAIN, steps=3, longest=10.0), ADAPTIVE, 600.0),  # it may evaluate for long
        (Reading(Phase.PLAIN), SHORT, math.inf),  # without steps
        (Reading(Phase.TRAINING, paused=True), SHORT, math.inf),
    ],
)
def test_a_limit_for_each_phase(reading: Reading, limits: Config, seconds: float) -> None:
    assert waits.hang_limit(reading, limits) == seconds


def test_a_script_that_never_imports_hvdrecover_is_not_judged() -> None:
    assert waits.hang_limit(Reading(Phase.UNKNOWN), SHORT, joins=False) == math.inf


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("limits", [SHORT, ADAPTIVE])
def test_every_phase_has_a_deadline(phase: Phase, limits: Config) -> None:
    assert 0 < waits.hang_limit(Reading(phase, steps=1), limits) <= 86400


@pytest.mark.parametrize("timeout", [LEAST_TIMEOUT, 5.5, 6, 7, 7.9, 8, 10, 15, 16, 30, 300, 86400])
def test_waiting_ranks_are_free_before_they_would_count_as_hanging(timeout: float) -> None:
    found = settings(timeout, {}, ours=False)
    stall, check = (int(found[f"HOROVOD_STALL_{name}_TIME_SECONDS"]) for name in ("SHUTDOWN", "CHECK"))
    assert stall >= 1 and check >= 1  # to Horovod, 0 is never
    assert stall + 2 * check < timeout  # a tensor in Horovod's cache takes up to two looks longer
    assert int(found["HOROVOD_GLOO_TIMEOUT_SECONDS"]) < timeout
