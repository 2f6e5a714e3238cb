"""Survivors of a lost rank: at connections that Gloo, unedited, aborts or waits at, and at a commit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, run_job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "lost_peer.py"
LATE_NOTICE = SCRIPT.with_name("late_notice.py")
SETS_AND_JOINS = SCRIPT.with_name("sets_and_joins.py")
# Nobody is told of a loss by a time-out, and collectives that are started at once are carried out together.
SETTINGS = {"HOROVOD_GLOO_TIMEOUT_SECONDS": str(10 * PATIENCE), "HOROVOD_CYCLE_TIME": "50"}

pytestmark = pytest.mark.acceptance


def test_survivors_are_neither_aborted_nor_left_waiting(tmp_path: Path) -> None:
    command = [*supervised("--no-standby", workers=3), sys.executable, str(SCRIPT), str(tmp_path)]
    log = run_job(command, tmp_path / "log", {**ROOT_MAY_USE_MPI, **SETTINGS})
    starts = [(tmp_path / f"starts-{rank}").read_text().split() for rank in range(3)]
    assert [len(each) for each in starts] == [3, 3, 3], log
    assert [len(set(each)) for each in starts] == [1, 1, 2], log  # only rank 2's process was ever lost


def test_process_sets_and_joins_survive_a_lost_rank(tmp_path: Path) -> None:
    command = [*supervised("--no-standby"), sys.executable, str(SETS_AND_JOINS), str(tmp_path)]
    log = run_job(command, tmp_path / "log", ROOT_MAY_USE_MPI)
    starts = [(tmp_path / f"starts-{rank}").read_text().split() for rank in range(2)]
    assert [len(each) for each in starts] == [4, 4], log
    assert [len(set(each)) for each in starts] == [1, 4], log  # rank 0 went on from its memory
    assert [(tmp_path / f"sums-{rank}").read_text() for rank in range(2)] == ["[2.0, 2.0, 2.0, 2.0]"] * 2


def test_a_commit_while_a_rank_has_joined_is_an_error_in_words(tmp_path: Path) -> None:
    command = [*supervised("--no-standby"), sys.executable, str(SETS_AND_JOINS), str(tmp_path), "commit"]
    for name in ("lost-before-a-set", "waited", "lost-in-a-set"):
        (tmp_path / name).touch()
    log = run_job(command, tmp_path / "log", ROOT_MAY_USE_MPI, code=1)
    assert "ConfigError: hvd.join" in log and "SIGSEGV" not in log


def test_a_commit_is_made_although_a_rank_was_lost_right_before_it(tmp_path: Path) -> None:
    command = [*supervised(), sys.executable, str(LATE_NOTICE), str(tmp_path)]
    log = run_job(command, tmp_path / "log", ROOT_MAY_USE_MPI)
    # A process that comes back slowly may cost another rollback.
    assert (tmp_path / "steps").read_text().split()[:2] == ["0", "4"], log
