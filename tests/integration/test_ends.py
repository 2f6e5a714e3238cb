"""Jobs that end for good under ``hvdrecover run``: replaced by another one, or by an error of the script."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from tests.support.jobs import (
    FENCED,
    PATIENCE,
    PREEMPTED,
    Job,
    commits,
    durable,
    read_events,
    run_job,
    supervised,
)

SCRIPT = Path(__file__).with_name("scripts") / "stubborn.py"
FOLDS = SCRIPT.with_name("folds.py")
STEPS = 8
# A script that runs the training command. On local rank 1, its second run does not come to that, and its
# third one hides the exit code behind that of `cat`.
WRAPPER = """
runs="$HVDRECOVER_EVENTS.runs.$HOROVOD_LOCAL_RANK"
echo >> "$runs"
case "$HOROVOD_LOCAL_RANK $(wc -l < "$runs")" in
    "1 2") exit 0 ;;
    "1 3") "$@" | cat ;;
    *) "$@" ;;
esac
exit $?
"""
Begin = Callable[..., Job]
Undisturbed = Callable[[int], set[str]]

pytestmark = pytest.mark.acceptance


@pytest.fixture
def begin(jobs: list[Job], tmp_path: Path) -> Begin:
    """Begins a job of two workers that trains for so many steps, and says its starts in ``NAME.starts``."""

    def start(
        name: str,
        how: str = "train",
        steps: int = 100_000,
        *options: str,
        workers: int = 2,
        wrapper: Sequence[str] = (),
    ) -> Job:
        words = [sys.executable, str(SCRIPT), how, str(tmp_path / f"{name}.starts"), str(steps), "0.05"]
        folders = {
            "HVDRECOVER_CHECKPOINT": str(tmp_path / "root"),
            "HVDRECOVER_EVENTS": str(tmp_path / f"{name}.events"),
        }
        launcher = supervised("--no-standby", *options, workers=workers)
        jobs.append(Job([*launcher, *wrapper, *words], tmp_path / f"{name}.log", folders))
        return jobs[-1]

    return start


def starts(folder: Path, name: str) -> list[str]:
    """From which step rank 0 has started, each time, and in which process."""
    file = folder / f"{name}.starts"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in lines if line.startswith("0 ")]


def weights(folder: Path, name: str) -> set[str]:
    return {file.read_text() for file in folder.glob(f"{name}.starts.*.weights")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the final weights of so many steps to which nothing happens, on one process."""

    @functools.cache
    def trained(steps: int) -> set[str]:
        folder = tmp_path_factory.mktemp("undisturbed")
        words = [sys.executable, str(SCRIPT), "train", str(folder / "job.starts"), str(steps), "0"]
        subprocess.run(words, env={**os.environ, "HVDRECOVER_CHECKPOINT": str(folder / "root")}, check=True)
        return weights(folder, "job")

    return trained


def faults(folder: Path, name: str) -> list[tuple[str, int]]:
    """The faults of a job, and the exit codes."""
    events = read_events(folder / f"{name}.events", "fault")
    return [(event["fault"], event["exit"]) for event in events if "exit" in event]


def claims(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "claims").iterdir())


def test_a_job_that_is_replaced_ends_and_leaves_the_other_alone(begin: Begin, tmp_path: Path) -> None:
    old, root = begin("old"), tmp_path / "root"
    wait_until(lambda: len(commits(root)) > 1)
    new = begin("new", "train", 60, workers=1)
    assert old.wait(PATIENCE) == FENCED, old.tail()
    assert old.processes() == []
    assert new.wait(PATIENCE) == 0, new.tail()
    assert len(starts(tmp_path, "old")) == len(starts(tmp_path, "new")) == 1
    assert claims(root) == ["g0001.json", "g0002.json"]
    log = old.log.read_text()
    assert "another job has claimed the checkpoint root" in log and "restarted" not in log


def test_a_job_that_was_stopped_while_it_was_replaced_finds_out(begin: Begin, tmp_path: Path) -> None:
    old, root = begin("old"), tmp_path / "root"
    wait_until(lambda: len(commits(root)) > 1)
    stopped = old.processes()
    for process in stopped:
        with suppress(ProcessLookupError):  # who looks for hosts comes and goes
            os.kill(process, signal.SIGSTOP)
    new = begin("new", "train", 60, workers=1)
    assert new.wait(PATIENCE) == 0, new.tail()
    for process in stopped:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    assert old.wait(PATIENCE) == FENCED, old.tail()
    assert old.processes() == []
    assert claims(root) == ["g0001.json", "g0002.json"]
    assert len(starts(tmp_path, "new")) == 1


def test_a_script_that_always_fails_at_one_place_ends_with_its_traceback(
    begin: Begin, tmp_path: Path
) -> None:
    job = begin("job", "fail", workers=1)
    assert job.wait(PATIENCE) == 1
    assert len(starts(tmp_path, "job")) == 3  # the last one from the commit before
    log = job.log.read_text()
    assert ", from which it has failed" in log
    assert log.rstrip().splitlines()[-1].startswith("ValueError: this script is wrong (")  # its text varies


def test_only_a_process_that_has_finished_has_whatever_a_wrapper_makes_of_its_exit_code(
    begin: Begin, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = begin("job", "killed", STEPS, wrapper=("bash", "-c", WRAPPER, "run.sh"))
    assert job.wait(PATIENCE) == 0, job.tail()
    # Behind 137, then by a run that did nothing, then behind the exit code of `cat`.
    assert faults(tmp_path, "job") == [("crash", -signal.SIGKILL), ("early_exit", 0), ("early_exit", 0)]
    assert weights(tmp_path, "job") == undisturbed(STEPS)


def test_kills_from_outside_make_no_commit_suspect(
    begin: Begin, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = begin("job", "killed at 4", STEPS, workers=1)
    assert job.wait(PATIENCE) == 0, job.tail()
    assert [line.split()[2] for line in starts(tmp_path, "job")] == ["0", *"4444"]
    assert "passing over" not in job.log.read_text()
    assert weights(tmp_path, "job") == undisturbed(STEPS)


def test_what_a_survivor_has_left_over_costs_a_fresh_start_and_not_the_job(
    begin: Begin, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job = begin("job", "leftovers", STEPS)
    assert job.wait(PATIENCE) == 0, job.tail()
    assert job.log.read_text().count("all processes start once more") == 1
    assert weights(tmp_path, "job") == undisturbed(STEPS)


def test_a_handler_of_the_scripts_that_ends_the_training_of_a_stopped_job_finishes_nothing(
    begin: Begin, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    job, root = begin("job", "handler"), tmp_path / "root"
    wait_until(lambda: len(commits(root)) > 1)
    for process in job.processes():  # as a batch system does
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    assert job.wait(PATIENCE) == PREEMPTED, job.tail()
    log = job.log.read_text()
    assert "SIGTERM goes to the script's own handler" in log and "training is finished" not in log
    last = durable(root)
    again = begin("job", "train", last + 2, workers=1)
    assert again.wait(PATIENCE) == 0, again.tail()
    # The first commit was before any step.
    assert starts(tmp_path, "job")[-1].startswith(f"0 from {last - 1} ")
    assert weights(tmp_path, "job") == undisturbed(last + 2)


def test_a_script_that_crashes_at_one_place_is_not_restarted_for_ever(begin: Begin, tmp_path: Path) -> None:
    job = begin("job", "abort", 100, "--max-restarts", "1", workers=1)
    assert job.wait(PATIENCE) == 1
    assert "1 restarts in a row have brought no progress" in job.log.read_text()
    assert len(starts(tmp_path, "job")) == 6  # commits are made at each


def test_a_job_that_was_restarted_may_have_another_state_with_a_root_of_its_own(
    begin: Begin, tmp_path: Path
) -> None:
    job = begin("job", "folds", 5, "--max-restarts", "1")
    assert job.wait(PATIENCE) == 0, job.tail()
    log = job.log.read_text()
    # Both were killed in the first fold, and one in the second: it came to the first one's root again.
    assert log.count("SIGKILL") == 3 and log.count("at different states of") >= 1
    assert len(claims(tmp_path / "root0")) >= 3 and len(claims(tmp_path / "root1")) >= 2


@pytest.mark.parametrize("root", [False, True])
def test_a_fold_never_gets_the_weights_of_another(root: bool, tmp_path: Path) -> None:
    environ = {"HVDRECOVER_CHECKPOINT": str(tmp_path / "root")} if root else {}
    command = [*supervised("--no-standby"), sys.executable, str(FOLDS), str(tmp_path)]
    log = run_job(command, tmp_path / "log", environ, code=int(root))
    weights = {path.name: float(path.read_text()) for path in tmp_path.glob("[12]-[01]")}
    if root:  # one for both folds
        assert weights == {"1-0": 0.5, "1-1": 0.5}
        assert "already finished another state" in log
    else:
        assert weights == {"1-0": 0.5, "1-1": 0.5, "2-0": 1.0, "2-1": 1.0}
        assert (tmp_path / "lost").exists()
