"""The settings that a drill advises, from what it has measured."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.cli.options import duration, hang_timeout
from hvdrecover.drill.advice import DAY, Measured, Phases, Rates, advise
from hvdrecover.elastic.durable.interval import Costs, best, share_lost

IN_MEMORY = Phases(0.1, 0.02, 0.1, 0.0, 0.06, 0.05)
FROM_DURABLE = Phases(1.0, 0.02, 5.0, 2.0, 0.5, 0.08)
MEASURED = Measured(
    stall=0.05,
    interval=4.0,
    write=0.3,
    slowdown=0.1,
    in_memory=(IN_MEMORY,),
    from_durable=(FROM_DURABLE,),
    silence=3.0,
    leave=4.2,
)
RATES = Rates(workers=1000)
TIMES = st.floats(1e-3, 1e5)


def advice(topic, measured=MEASURED, rates=RATES):
    return next(found for found in advise(measured, rates) if found.topic == topic)


def test_the_phases_of_a_recovery_add_up():
    assert IN_MEMORY.seconds == pytest.approx(0.33)


def test_each_topic_once():
    topics = [found.topic for found in advise(MEASURED, RATES)]
    assert topics == ["commit interval", "durable interval", "grace period", "hang timeout"]


def test_commits_in_memory_are_paced_by_their_copy_and_the_loss_of_single_workers():
    mtbf = 365 * DAY / 1000
    found = advice("commit interval")
    assert found.seconds == best(Costs(0.05, 0.33, mtbf)).seconds
    assert "a commit stalls training for 0.05 s" in found.text
    assert "with 1000 workers one is lost every 8.8 h" in found.text
    now = share_lost(Costs(0.05, 0.33, mtbf), 4.0)
    assert f"with a commit every 4 s, as in the drill, it is {100 * now:.2g}%" in found.text


def test_durable_commits_are_paced_by_what_a_write_costs_too_as_if_each_failure_took_all_memories():
    found = advice("durable interval")
    assert found.seconds == best(Costs(0.05 + 0.1, 0.0, 365 * DAY / 1000), least=0.3).seconds
    assert found.setting == "Checkpoint(every_seconds=98)"
    assert (
        "costs training 0.15 s, its write takes 0.3 s, and with 1000 workers one is lost every 8.8 h"
        in found.text
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"stall": 0.05}, "which loses least"),
        ({"stall": 40.0}, "as stalls may take 1% of the time"),
        ({"write": 7000.0}, "as a write takes that long"),
    ],
)
def test_the_reason_is_given(changes, why):
    assert why in advice("durable interval", dataclasses.replace(MEASURED, **changes)).text


@given(TIMES, TIMES, TIMES)
def test_the_durable_interval_that_can_be_set_is_never_shorter_than_it_should_be(stall, write, slowdown):
    found = advice("durable interval", Measured(stall=stall, write=write, slowdown=slowdown))
    value = float(found.setting.split("=")[1].rstrip(")"))
    assert found.seconds * (1 - 1e-9) <= value <= found.seconds * 1.11
    assert value >= write * (1 - 1e-9)
    Checkpoint("/data", every_seconds=value)


@pytest.mark.parametrize(
    ("changes", "grace"),
    [
        ({}, 9.0),  # twice 4.2 s
        ({"interval": 60.0, "write": 7.0}, 74.0),  # a commit, the write under way, and that of the last one
        ({"interval": None, "write": None}, 9.0),
    ],
)
def test_the_grace_period_covers_what_leaving_took_and_what_it_may_take(changes, grace):
    found = advice("grace period", dataclasses.replace(MEASURED, **changes))
    assert (found.seconds, found.setting) == (grace, f"--grace {grace:g}")
    assert duration(found.setting.removeprefix("--grace ")) == grace
    assert "more in the scheduler" in found.text


@pytest.mark.parametrize(("silence", "timeout"), [(3.0, 15.0), (0.01, 5.0), (100.1, 501.0)])
def test_the_hang_timeout_is_a_multiple_of_the_longest_silence(silence, timeout):
    found = advice("hang timeout", dataclasses.replace(MEASURED, silence=silence))
    assert found.seconds == hang_timeout(found.setting.removeprefix("--hang-timeout ")) == timeout


@pytest.mark.parametrize(
    ("unknown", "missing"),
    [
        ("stall", {"commit interval", "durable interval"}),
        ("interval", {"commit interval"}),
        ("write", {"durable interval"}),
        ("slowdown", set()),
        ("leave", {"grace period"}),
        ("silence", {"hang timeout"}),
    ],
)
def test_what_was_not_measured_is_not_advised_about(unknown, missing):
    found = advise(dataclasses.replace(MEASURED, **{unknown: None}), RATES)
    topics = {"commit interval", "durable interval", "grace period", "hang timeout"}
    assert {each.topic for each in found} == topics - missing


@pytest.mark.parametrize(
    ("measured", "rates"),
    [
        (dataclasses.replace(MEASURED, stall=0.0, slowdown=0.0, write=0.0), RATES),  # commits cost nothing
        (MEASURED, Rates(8, mtbf_worker=math.inf)),  # and are never needed
    ],
)
def test_no_interval_is_advised_where_there_is_none(measured, rates):
    assert {each.topic for each in advise(measured, rates)} == {"grace period", "hang timeout"}
