from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hvdrecover import error_kinds, errors
from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Phase, Stop
from hvdrecover.launch import ends
from hvdrecover.launch.ends import Death, Record
from tests.unit.launch.readings import death

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


def failed(returncode: int = 1, error: str = OWN_ERROR, **facts: Any) -> Death:
    return death(returncode, error=error, **{"generation": 1, "commit": 4, "changed": 4, "steps": 2, **facts})


def test_an_error_before_the_first_commit_is_one_of_its_own() -> None:
    assert ends.end_of(failed(), first=True).name == "first_error"
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


def reasons(*ended: Death, record: Record | None = None) -> list[str]:
    """Return why a slot's process was not restarted after each of these deaths."""
    record = record or Record()
    found = []
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
