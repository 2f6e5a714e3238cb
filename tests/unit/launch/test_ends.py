from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import error_kinds, errors
from hvdrecover.config import FENCED, PREEMPTED
from hvdrecover.heartbeat import Phase, Reading, Stop
from hvdrecover.launch import ends, waits
from hvdrecover.launch.ends import CALM, SAME_ERROR, Attempt, Death, Outcome, Record, Streak, Together

DOCS = Path(__file__).parents[3] / "docs" / "launching.md"


@pytest.mark.parametrize("end", ends.ENDS, ids=lambda end: end.name)
def test_the_docs_have_each_end_with_its_exit_code(end: ends.End) -> None:
    row = next(line for line in DOCS.read_text().splitlines() if line.startswith(f"| process: {end.how} |"))
    others = "-" if end.repair == "none" else "the script's"
    assert row.endswith(f"| {others if end.code is None else end.code} |")


def test_errors_of_the_table_are_ours_and_stand_in_one_row() -> None:
    named = [error for end in ends.ENDS for error in end.errors]
    assert len(named) == len(set(named))
    assert all(issubclass(getattr(errors, name), errors.HvdrecoverError) for name in named)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        (errors.OvertakenError("u", "p"), "overtaken"),
        (errors.FencedError("u", "p"), "fenced"),
        (errors.DurableAgeError("u", "p"), "too_old"),
        (errors.StorageError("u", "p"), "storage"),
        (errors.NoUsableCommitError("u", {}), "unusable"),
        (errors.UnsupportedValueError("state.x", "p"), "wrong"),
        (errors.RendezvousError("p"), "rendezvous"),
        (errors.NoProgressError("p", commit=1), "no_progress"),
        (errors.StoppedError("p", "FencedError"), "fenced"),
        (errors.StoppedError("p", "StorageError"), "storage"),
        (errors.StoppedError("p", "ValueError"), "rendezvous"),
        (errors.DivergedError("p", [], "r"), "script_error"),
        (ValueError("p"), "script_error"),
    ],
)
def test_how_an_error_ends_a_process(error: BaseException, name: str) -> None:
    assert ends.of_error(error_kinds.kinds(error), first=False).name == name


def test_every_class_of_errors_has_a_number_and_back() -> None:
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    ours = [each for each in classes if issubclass(each, errors.HvdrecoverError)]
    found = {error_kinds.number(each.__new__(each)) for each in ours}
    assert found == set(range(1, len(ours) + 1))
    assert error_kinds.number(None) == 0
    assert error_kinds.name(error_kinds.number(errors.FencedError("u", "p"))) == "FencedError"


# -- deaths of training processes ----------------------------------------------------------------------


def death(returncode: int, phase: Phase = Phase.TRAINING, **facts: Any) -> Death:
    """The end of a process; facts of the page go there."""
    notes = {name: facts.pop(name) for name in ("error", "identity", "kinds") if name in facts}
    own = {name: facts.pop(name) for name in ("hung", "out_of_memory", "lost") if name in facts}
    return Death(returncode, Reading(phase, **facts), notes, **own)


KILLED = -signal.SIGKILL
OWN_ERROR = "ZeroDivisionError: division by zero"
INTERNAL = "horovod.common.exceptions.HorovodInternalError"


@pytest.mark.parametrize(
    ("ended", "name"),
    [
        (death(0, Phase.FINISHED), "finished"),
        (death(0, Phase.UNKNOWN), "early_exit"),  # `python train.py | tee log`, say
        (death(0, Phase.UNKNOWN, error=OWN_ERROR), "script_error"),
        (death(0, Phase.FINISHED, error=OWN_ERROR), "finished"),
        (death(0, Phase.STARTING), "early_exit"),
        (death(1, Phase.FINISHED), "script_error"),
        (death(KILLED, Phase.FINISHED), "crash"),
        (death(PREEMPTED, Phase.LEFT), "left"),
        (death(0, Phase.LEFT), "left"),
        (death(PREEMPTED, Phase.REMOVED), "removed"),
        (death(PREEMPTED, Phase.TRAINING, stop=Stop.HOST), "left"),
        (death(PREEMPTED, Phase.TRAINING), "script_error"),  # the script's own number, by chance
        (death(1, Phase.TRAINING, stop=Stop.JOB), "script_error"),
        (death(-signal.SIGTERM), "dismissed"),
        (death(-signal.SIGTERM, Phase.LEFT), "left"),
        (death(KILLED), "crash"),
        (death(KILLED, hung=True), "hang"),
        (death(KILLED, Phase.BEGINNING, hung=True), "hang"),
        (death(KILLED, Phase.RECOVERING, hung=True), "apart"),  # where ranks wait for each other
        (death(1, kinds=("FencedError", "CheckpointError", "HvdrecoverError")), "fenced"),
        (death(1, kinds=("FencedError", "StoppedError")), "fenced"),  # as another rank has heard of it
        (death(1, kinds=("OvertakenError", "FencedError")), "overtaken"),
        (death(1, kinds=("DurableAgeError", "StorageError")), "too_old"),
        (death(1, kinds=("StorageError", "CheckpointError")), "storage"),
        (death(1, kinds=("NumericsError", "HvdrecoverError")), "script_error"),
        (death(KILLED, out_of_memory=True), "out_of_memory"),
        (death(KILLED, hung=True, out_of_memory=True), "hang"),
        (death(-signal.SIGSEGV, out_of_memory=True), "crash"),  # the kernel kills by SIGKILL, so another one
        (death(1, error="ValueError: Horovod initialization failed"), "crash"),
        (death(1, error=f"{INTERNAL}: a rank was lost"), "crash"),
        (death(0, error=f"{INTERNAL}: Horovod has been shut down."), "crash"),
        (death(1, error="HostsUpdatedInterrupt: True"), "crash"),
        (death(1, error=f"{INTERNAL}: Mismatched ALLREDUCE tensor shapes: One rank"), "script_error"),
        (death(1, error=f"… {INTERNAL}", kinds=("NoProgressError",)), "no_progress"),
    ],
)
def test_how_a_process_has_ended(ended: Death, name: str) -> None:
    assert ends.end_of(ended).name == name


def test_an_error_before_the_first_commit_is_one_of_its_own() -> None:
    assert ends.end_of(death(1, error=OWN_ERROR), first=True).name == "first_error"
    away = death(1, error="StorageError: s3://b is away", kinds=("StorageError",))
    assert ends.end_of(away, first=True).name == "storage"  # which may come back
    refused = death(1, error="StorageError: /etc is not ours", kinds=("StorageError", "PermissionError"))
    assert ends.end_of(refused, first=True).name == "first_error"
    assert ends.end_of(refused, first=False).name == "storage"
    assert ends.end_of(death(KILLED), first=True).name == "crash"


def test_a_script_that_calls_no_training_function_has_not_failed() -> None:
    assert ends.end_of(death(0, Phase.STARTING), first=True).name == "untrained"
    assert ends.end_of(death(0, Phase.UNKNOWN), first=True).name == "untrained"
    assert ends.end_of(death(0, Phase.BEGINNING), first=True).name == "early_exit"
    assert ends.end_of(death(0, Phase.STARTING), first=False).name == "early_exit"  # restarted, and left out
    assert ends.end_of(death(0, Phase.STARTING, error=OWN_ERROR), first=True).name == "first_error"


def reasons(*ended: Death) -> list[str]:
    """Return why a slot's process was not restarted after each of these deaths."""
    record, found = Record(), []
    for each in ended:
        record.note(each.reading)
        found.append(record.died(each))
    return found


def test_only_what_goes_beyond_the_farthest_point_is_progress() -> None:
    commits = [death(KILLED, commits=1, commit=number, changed=7) for number in (7, 8, 9)]
    assert reasons(*commits)[2].startswith("3 deaths")  # commits, but nothing had changed
    catching_up = [death(KILLED, changed=changed, steps=3) for changed in (7, 5, 7)]
    assert reasons(*catching_up)[2].startswith("3 deaths")
    assert reasons(*[death(KILLED, changed=7, steps=steps) for steps in range(9)]) == [""] * 9
    assert reasons(*[death(KILLED, changed=changed) for changed in range(9)]) == [""] * 9


def test_pauses_begin_with_the_second_death_and_double() -> None:
    assert [ends.pause(number) for number in range(1, 5)] == [0.0, 1.0, 2.0, 4.0]
    assert ends.pause(100) == 60.0


# -- decisions about the whole job ----------------------------------------------------------------------


def crash(number: int = 1) -> dict[str, Any]:
    facts = {"fault": "crash", "end": "crash", "message": f"crash {number}", "exit": -signal.SIGKILL}
    return {**facts, "at": "a/0", "commit": [1, 4], "point": [4, 0], "detail": "SIGKILL"}


def script_error(commit: int = 4, detail: str = "KeyError: 'x'") -> dict[str, Any]:
    facts = {"fault": "script_error", "end": "script_error", "name": "rank 0 on a", "message": "it failed"}
    facts |= {"at": "a/0", "detail": detail, "traceback": "Traceback …"}
    return {**facts, "exit": 1, "point": [commit, 0], "final": True}


def attempt(
    code: int = 1, *ended: str, faults: list[dict[str, Any]] | None = None, commit: int = 0
) -> Attempt:
    return Attempt(1, code, list(ended), [crash()] if faults is None else faults, (commit, 0))


def after(*attempts: Attempt, without: int = 0, stopping: bool = False, most: int = 3) -> Outcome:
    return ends.outcome(attempts, without, ranks=2, stopping=stopping, max_restarts=most)


@pytest.mark.parametrize(
    ("ended", "stopping", "code"),
    [
        (attempt(0, "finished", "finished"), False, 0),
        (attempt(0, "finished"), True, 0),
        (attempt(0, "left", "stopped", "finished"), False, 0),
        (attempt(1, "finished", "finished", faults=[]), False, 0),  # its terminal is closed, say
        (attempt(0), False, 0),  # a command that tells nothing
        (attempt(0, "untrained", "untrained"), False, 0),  # after a crash that was repaired
        (attempt(PREEMPTED, "preempted", "stopped"), False, PREEMPTED),
        (attempt(PREEMPTED, "left"), True, PREEMPTED),
        (attempt(PREEMPTED, "finished", "left"), True, PREEMPTED),
        (attempt(PREEMPTED), True, PREEMPTED),
        (attempt(ends.REFUSED, faults=[]), False, ends.REFUSED),  # Horovod lacks what it needs
        (attempt(1, "finished", faults=[]), False, None),
        (attempt(1, "finished", "left"), False, None),
        (attempt(1, "left", "stopped"), False, None),
        (attempt(1, "untrained", faults=[]), False, None),  # another slot is lost
        (attempt(0, "untrained", "stopped", faults=[]), False, None),
        (attempt(0, "untrained"), False, None),  # after a crash of the other one
    ],
)
def test_a_job_ends_with_a_code_or_starts_again(ended: Attempt, stopping: bool, code: int | None) -> None:
    outcome = after(ended, stopping=stopping)
    assert (outcome.action, outcome.code) == (("restart", 1) if code is None else ("end", code))


def test_a_command_without_a_state_is_told_what_a_state_would_do() -> None:
    assert "without a commit" in after(attempt(0, "untrained", "untrained", faults=[])).message
    fewer = attempt(0, "untrained")  # a job that began on fewer hosts, and had a crash
    fewer.guardians = 1
    assert after(fewer).action == "end"
    committed = attempt(0, "untrained", "untrained", faults=[])
    committed.committed = True
    assert "state.finish()" in after(committed).message
    committed.in_run = True
    assert after(committed).action == "restart"


def test_pauses_double_and_end_with_the_budget() -> None:
    attempts, without, pauses = [], 0, []
    while (
        outcome := after(*(attempts := [*attempts, attempt()]), without=without, most=8)
    ).action == "restart":
        pauses.append(outcome.pause)
        without = outcome.without_progress
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert outcome == Outcome("end", 1, "8 restarts in a row have brought no progress")


def test_the_same_error_twice_in_one_slot_ends_the_job() -> None:
    first, again = script_error(), script_error()
    assert after(attempt(faults=[first, again])).reason == SAME_ERROR
    assert after(attempt(faults=[first, {**again, "at": "b/0"}])).action == "restart"  # of both ranks, once
    varying = {"detail": "RuntimeError: pid 7", "identity": "RuntimeError at train.py:7"}
    told = [{**script_error(), **varying}, {**script_error(detail="RuntimeError: pid 8"), **varying}]
    assert after(attempt(faults=told)).reason == SAME_ERROR


@pytest.mark.parametrize(
    "before",
    [[script_error(3)], [script_error(detail="KeyError: 'y'")], [crash()], [], [script_error(3), crash()]],
)
def test_another_error_or_the_same_elsewhere_is_given_another_try(before: list[dict[str, Any]]) -> None:
    assert after(attempt(faults=before), attempt(faults=[script_error()])).action == "restart"


def test_an_error_that_follows_a_recovery_in_place_has_all_processes_start_once() -> None:
    again, first = {**script_error(), "again": True}, {**script_error(0), "end": "first_error"}
    unusable = {**script_error(detail="MismatchError: it does not fit"), "end": "unusable"}
    for error in (again, first, unusable):
        before = attempt(faults=[crash(), of_others(), error])
        outcome = after(before)
        assert (outcome.action, "fresh start" in outcome.reason) == ("restart", True)
        assert after(before, attempt(faults=[crash(), error])).action == "end"
        assert after(attempt(faults=[of_others(), error])).action == "end"
        assert after(before, most=0).traceback == "Traceback …"
    fenced = {**script_error(detail="FencedError: job 2"), "end": "fenced"}
    assert after(attempt(faults=[crash(), fenced])).code == FENCED
    assert after(attempt(faults=[loaded(), loaded(), fenced])).code == FENCED


def test_a_ranks_own_error_is_shown_rather_than_what_others_have_heard() -> None:
    heard = {**script_error(detail="StoppedError: rank 0 has stopped"), "end": "fenced", "heard": True}
    own = {**script_error(detail="FencedError: job 2"), "end": "fenced"}
    assert ends.ending([attempt(faults=[heard])]) == heard
    assert ends.ending([attempt(faults=[heard, own])]) == own
    assert ends.ending([attempt(faults=[crash()])]) is None


def of_others() -> dict[str, Any]:
    """The end of a process whose collective has failed, as another process was lost."""
    return {**crash(), "exit": 1, "detail": "HorovodInternalError: Horovod has been shut down"}


def loaded(commit: int = 7, made: int = 7, **facts: Any) -> dict[str, Any]:
    """A crash of a process that had loaded a commit, and made others of it without any progress."""
    name, how = f"g0001-c{commit:08d}", {"exit": -signal.SIGSEGV, "detail": "SIGSEGV"}
    return {**crash(), **how, "loaded": name, "commit": [2, made], **facts}


def test_a_commit_from_which_the_job_fails_twice_in_the_same_way_is_passed_over() -> None:
    once = attempt(faults=[loaded()])
    assert after(once).suspect is None
    assert after(once, attempt(faults=[loaded()])).suspect == "g0001-c00000007..g0002-c00000007"
    assert after(attempt(faults=[loaded(), loaded()])).suspect == "g0001-c00000007..g0002-c00000007"


def test_a_fault_that_costs_two_ranks_their_process_is_one_failure() -> None:
    assert after(attempt(faults=[loaded(at="a/0"), loaded(at="a/1")])).suspect is None
    again = attempt(faults=[loaded(at="a/1"), loaded(at="a/0")])
    assert after(attempt(faults=[loaded(at="a/0")]), again).suspect == "g0001-c00000007..g0002-c00000007"


def test_the_same_error_right_after_a_load_tries_the_commit_before_once() -> None:
    first, again = {**script_error(), "final": False}, {**script_error(), "again": True}
    at_once = {**again, "loaded": "g0001-c00000004", "commit": [2, 5]}
    outcome = after(attempt(faults=[first, at_once]))
    assert (outcome.action, outcome.suspect) == ("restart", "g0001-c00000004..g0002-c00000005")
    assert after(attempt(faults=[first, at_once]), attempt(faults=[again])).reason == SAME_ERROR


# -- processes outside a training function --------------------------------------------------------------


def outside(at: str = "a/0", time: float = 100.0, **facts: Any) -> dict[str, Any]:
    """The report of a process outside `run`."""
    point, age = facts.pop("point", [0, 7]), facts.pop("age", 900.0)
    return {**crash(), "at": at, "time": time, "round": 0, "point": point, "age": age, **facts}


def error_outside(detail: str = "KeyError: 'x'", **facts: Any) -> dict[str, Any]:
    facts = {"fault": "script_error", "end": "first_error", "exit": 1, "detail": detail, **facts}
    return outside(name="rank 0 on a", **facts)


def of_other(at: str = "a/1", **facts: Any) -> dict[str, Any]:
    """The end of a process whose collective has failed."""
    return outside(at, **{"exit": 1, "detail": "HorovodInternalError: shut down", **facts})


def plain(*faults: dict[str, Any], **facts: Any) -> Attempt:
    return Attempt(facts.pop("number", 1), faults=list(faults), guardians=2, **facts)


def decided(
    last: Attempt, streak: Streak | None = None, *, guardians: int = 2, begun: bool = True, now: float = 100.0
) -> Together | None:
    facts = {"guardians": guardians, "begun": begun, "now": now, "max_restarts": 3}
    return ends.together(last, streak or Streak(), **facts)  # type: ignore[arg-type]


def action(*args: Any, **facts: Any) -> str | None:
    decision = decided(*args, **facts)
    return decision and decision.action


def test_the_end_of_a_process_whose_collective_failed_is_not_the_cause() -> None:
    decision = decided(plain(of_other(), outside()))
    assert decision is not None and decision.fault["at"] == "a/0"
    assert action(plain(of_other()), now=100.0 + waits.CULPRIT / 2) == "wait"
    assert action(plain(of_other()), now=101.0 + waits.CULPRIT) == "restart"  # that process is stopped, say
    assert action(plain(of_other(), of_other("a/0"))) == "restart"  # no other one is left


def test_all_ranks_start_anew_if_they_cannot_in_place() -> None:
    assert action(plain(outside()), guardians=1) == "over"
    assert action(plain(outside()), begun=False) == "over"
    assert action(plain({"fault": "lost_host", "message": "gone", "time": 1.0})) == "over"


def test_a_rank_that_ends_early_is_the_cause_if_the_others_fail() -> None:
    ended = error_outside("exit code 0", fault="early_exit", exit=0)
    decision = decided(plain(of_other(), exits=[ended]))
    assert decision is not None and (decision.action, decision.fault) == ("restart", ended)
    assert action(plain(exits=[ended])) is None  # the others may end as well
    assert action(plain(of_other(), exits=[ended]), Streak(1, decision.error, time=50.0)) == "end"


def test_restarts_count_until_there_is_progress_or_a_calm_hour() -> None:
    used = Streak(3, None, time=100.0)
    assert action(plain(outside()), used) == "over"
    assert used.before(plain(), 100.0 + CALM) == used
    assert used.before(plain(), 101.0 + CALM).restarts == 0
    assert used.before(plain(point=(1, 0)), 100.0).restarts == 0
    assert used.before(plain(point=(0, 9)), 100.0).restarts == 3  # its own checkpoints are not known of


def test_a_job_that_cannot_restart_in_place_starts_again_or_is_given_up() -> None:
    over = plain(outside(), over=True, code=1)
    again = after(over, without=1)
    assert (again.action, again.without_progress, again.reason) == ("restart", 2, over.faults[0]["message"])
    assert after(over, without=3).action == "end"
    error = error_outside(final=True, traceback="Traceback: x")
    assert after(plain(error, over=True, code=1)).traceback == "Traceback: x"
    twice = error_outside(final=True, again=True, end="script_error", traceback="Traceback: x")
    assert after(plain(outside(), twice, over=True, code=1)).message == f"rank 0 on a: {SAME_ERROR}:"
