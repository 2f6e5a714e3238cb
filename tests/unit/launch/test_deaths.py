from __future__ import annotations

import signal

import pytest

from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Phase, Stop
from hvdrecover.launch import deaths
from hvdrecover.launch.deaths import Death
from tests.unit.launch.readings import death

KILLED, ABORTED = -signal.SIGKILL, -signal.SIGABRT
OWN_ERROR = "ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (death(0, Phase.FINISHED), "finished"),
        (death(0, Phase.UNKNOWN), "finished"),  # it is no script of ours
        (death(0, Phase.STARTING), "lost"),
        (death(0, Phase.TRAINING), "lost"),
        (death(0, Phase.RECOVERING), "lost"),
        (death(0, Phase.READY), "lost"),
        (death(1, Phase.FINISHED), "lost"),
        (death(1, Phase.UNKNOWN), "lost"),
        (death(KILLED, Phase.FINISHED), "lost"),
        (death(PREEMPTED, Phase.LEFT), "left"),
        (death(0, Phase.LEFT), "left"),
        (death(KILLED, Phase.LEFT), "left"),
        (death(PREEMPTED, Phase.REMOVED), "removed"),
        (death(PREEMPTED, Phase.TRAINING, stop=Stop.HOST), "left"),
        (death(PREEMPTED, Phase.TRAINING, stop=Stop.JOB), "left"),
        (death(PREEMPTED, Phase.TRAINING), "lost"),  # the script's own number, by chance
        (death(1, Phase.TRAINING, stop=Stop.JOB), "lost"),
        (death(-signal.SIGTERM), "told"),
        (death(-signal.SIGTERM, Phase.LEFT), "left"),
        (death(-signal.SIGINT), "lost"),
        (death(KILLED), "lost"),
    ],
)
def test_whether_a_process_came_to_a_good_end(end: Death, verdict: str) -> None:
    assert deaths.verdict(end) == verdict


@pytest.mark.parametrize(
    ("end", "fault"),
    [
        (death(KILLED), "crash"),
        (death(ABORTED), "crash"),
        (death(KILLED, hung=True), "hang"),
        (death(KILLED, hung=True, out_of_memory=True), "hang"),
        (death(KILLED, out_of_memory=True), "out_of_memory"),
        (death(-signal.SIGSEGV, out_of_memory=True), "crash"),  # the kernel kills by SIGKILL, so another one
        (death(1, out_of_memory=True, error=OWN_ERROR), "script_error"),
        (death(0), "early_exit"),
        (death(1, error=OWN_ERROR), "script_error"),
        (death(3), "script_error"),
        (death(1, error="ValueError: Horovod initialization failed"), "crash"),
        (death(1, error="horovod.common.exceptions.HorovodInternalError: a rank was lost"), "crash"),
        (death(1, error="HostsUpdatedInterrupt: True"), "crash"),
    ],
)
def test_what_kind_of_fault_it_was(end: Death, fault: str) -> None:
    assert deaths.fault(end) == fault


def failed(returncode: int = 1, error: str = OWN_ERROR, **facts: int) -> Death:
    return death(returncode, error=error, **{"generation": 1, "commit": 4, "steps": 2, **facts})


def test_the_same_error_at_the_same_place_will_come_again() -> None:
    assert deaths.is_same_error(failed(), failed())
    assert deaths.is_same_error(failed(generation=2), failed())  # each meeting has a generation of its own


@pytest.mark.parametrize(
    "before",
    [
        None,
        failed(error="ZeroDivisionError: float division by zero"),
        failed(returncode=2),
        failed(commit=3),
        failed(steps=1),
        death(KILLED, commit=4, steps=2),
    ],
)
def test_an_error_elsewhere_or_of_another_kind_is_not_the_same(before: Death | None) -> None:
    assert not deaths.is_same_error(failed(), before)


def test_two_equal_deaths_that_are_not_the_scripts_doing_are_no_error() -> None:
    assert not deaths.is_same_error(death(KILLED), death(KILLED))
    lost = death(1, error="HorovodInternalError: a rank was lost")
    assert not deaths.is_same_error(lost, lost)


def test_a_process_is_restarted_until_its_budget_is_used_up() -> None:
    answers = [deaths.may_restart(number, death(KILLED), death(KILLED)) for number in range(1, 5)]
    assert answers[:2] == ["", ""]
    assert answers[2:] == [f"{number} deaths in a row without a commit in between" for number in (3, 4)]


def test_a_script_that_fails_twice_at_the_same_place_is_not_restarted() -> None:
    assert (
        deaths.may_restart(2, failed(), failed())
        == "the script has failed twice in the same way at the same commit"
    )
    assert deaths.may_restart(2, failed(), failed(steps=1)) == ""
    assert deaths.may_restart(1, failed(), None) == ""


def test_what_dies_after_the_end_is_not_restarted() -> None:
    assert "have finished" in deaths.may_restart(1, death(KILLED, Phase.FINISHED), None)


def test_ranks_that_wait_too_long_to_meet_are_apart() -> None:
    assert deaths.is_apart(death(KILLED, Phase.RECOVERING, hung=True))
    assert deaths.is_apart(death(KILLED, Phase.STARTING, hung=True))
    assert not deaths.is_apart(death(KILLED, Phase.BEGINNING, hung=True))
    assert not deaths.is_apart(death(KILLED, Phase.TRAINING, hung=True))
    assert not deaths.is_apart(death(KILLED, Phase.RECOVERING))
