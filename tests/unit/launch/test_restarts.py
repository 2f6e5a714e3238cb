from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.config import PREEMPTED
from hvdrecover.launch import restarts
from hvdrecover.launch.restarts import Attempt, Outcome


def crash(number: int = 1) -> dict[str, Any]:
    return {"fault": "crash", "message": f"crash {number}", "commit": [1, 4], "detail": "SIGKILL"}


def script_error(commit: int = 4, detail: str = "KeyError: 'x'", code: int = 1) -> dict[str, Any]:
    facts = {"fault": "script_error", "message": "it failed", "exit": code}
    return {**facts, "commit": [1, commit], "detail": detail}


def attempt(
    code: int = 1, *ends: str, faults: list[dict[str, Any]] | None = None, commit: int = 0
) -> Attempt:
    return Attempt(1, code, list(ends), [crash()] if faults is None else faults, (1, commit))


def after(*attempts: Attempt, without: int = 0, stopping: bool = False, most: int = 3) -> Outcome:
    return restarts.outcome(attempts, without, stopping=stopping, max_restarts=most)


def test_a_job_whose_slots_have_all_finished_is_finished() -> None:
    assert after(attempt(0, "finished", "finished")) == Outcome("end", 0, "the training is finished")


def test_a_job_that_is_finished_is_so_even_if_it_was_asked_to_leave_or_lost_hosts_before() -> None:
    assert after(attempt(0, "finished"), stopping=True).code == 0
    assert after(attempt(0, "left", "stopped", "finished")).code == 0


@pytest.mark.parametrize(
    ("ends", "stopping"),
    [
        (("preempted", "preempted"), False),
        (("preempted", "stopped"), False),  # Horovod's driver ends the last ones as soon as one has gone
        (("left",), True),
        (("finished", "left"), True),
        ((), True),
        (("stopped",), True),
    ],
)
def test_a_job_that_has_left_ends_with_the_code_for_another_start(
    ends: tuple[str, ...], stopping: bool
) -> None:
    outcome = after(attempt(PREEMPTED, *ends), stopping=stopping)
    assert (outcome.action, outcome.code) == ("end", PREEMPTED)


@pytest.mark.parametrize(
    "ends", [("finished", "left"), ("finished", "stopped"), ("stopped",), ("left", "stopped")]
)
def test_a_job_of_which_only_a_part_has_finished_or_left_is_started_again(ends: tuple[str, ...]) -> None:
    assert after(attempt(1, *ends)).action == "restart"


def test_a_command_that_says_nothing_of_itself_is_believed_by_its_exit_code() -> None:
    assert after(attempt(0)) == Outcome("end", 0, "the command has ended")
    assert after(attempt(1, faults=[])) == Outcome(
        "restart", 1, "the launcher ended with exit code 1", 1.0, without_progress=1
    )


def test_exit_code_0_of_a_launcher_does_not_hide_that_slots_were_stopped() -> None:
    assert after(attempt(0, "stopped")).action == "restart"


def test_pauses_double_and_end_with_the_budget() -> None:
    attempts, without, pauses = [], 0, []
    while (
        outcome := after(*(attempts := [*attempts, attempt()]), without=without, most=8)
    ).action == "restart":
        pauses.append(outcome.pause)
        without = outcome.without_progress
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert outcome == Outcome("end", 1, "8 restarts in a row have brought no progress")


def test_progress_refills_the_budget() -> None:
    before = [attempt(commit=2), attempt(commit=2)]
    assert after(*before, attempt(commit=2), without=3).action == "end"
    assert after(*before, attempt(commit=3), without=3) == Outcome(
        "restart", 1, "Horovod gave up; the last fault: crash 1", 1.0, without_progress=1
    )


def test_going_back_and_catching_up_is_no_progress() -> None:
    assert after(attempt(commit=5), attempt(commit=1), attempt(commit=5), without=3).action == "end"


def test_a_later_generation_is_no_progress_either() -> None:
    before, last = attempt(commit=5), attempt(commit=5)
    last.commit = (9, 5)
    assert after(before, last, without=3).action == "end"


def test_no_restart_may_be_allowed() -> None:
    assert after(attempt(), most=0) == Outcome("end", 1, "0 restarts in a row have brought no progress")


def test_a_script_that_fails_in_the_same_way_again_ends_the_job_with_its_own_code() -> None:
    failing = attempt(faults=[crash(), script_error(code=3)])
    assert after(failing).action == "restart"
    outcome = after(failing, attempt(faults=[script_error(code=3)]), most=99)
    assert (outcome.action, outcome.code) == ("end", 3)
    assert "failed in the same way" in outcome.reason


@pytest.mark.parametrize(
    "before",
    [
        [script_error(commit=3)],
        [script_error(detail="KeyError: 'y'")],
        [crash()],
        [],
        [script_error(), script_error(3)],
    ],
)
def test_another_error_or_the_same_elsewhere_is_given_another_try(before: list[dict[str, Any]]) -> None:
    assert after(attempt(faults=before), attempt(faults=[script_error()])).action == "restart"


def test_an_error_of_a_script_that_has_no_commit_yet() -> None:
    error = {"fault": "script_error", "detail": "KeyError", "exit": None, "commit": None}
    assert after(attempt(faults=[error]), attempt(faults=[error])).code == 1


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (attempt(-9), "the launcher was killed by signal 9"),
        (attempt(1, faults=[crash(1), crash(2)]), "Horovod gave up; the last fault: crash 2"),
        (attempt(5, faults=[]), "the launcher ended with exit code 5"),
    ],
)
def test_why_a_start_has_ended(end: Attempt, words: str) -> None:
    assert restarts.reason(end) == words


def test_a_job_whose_ranks_have_not_come_together_starts_again() -> None:
    apart = attempt(1, commit=4)
    apart.apart = True
    words = "the ranks have not come together; crash 1"
    assert after(apart) == Outcome("restart", 1, words, 1.0, 1)
