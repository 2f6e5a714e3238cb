"""A rank commits although it could know that another one is lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.jobs import ROOT_MAY_USE_MPI, run_job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "late_notice.py"

pytestmark = pytest.mark.acceptance


def test_a_commit_is_made_although_a_rank_was_lost_right_before_it(tmp_path: Path) -> None:
    command = [*supervised(), sys.executable, str(SCRIPT), str(tmp_path)]
    log = run_job(command, tmp_path / "log", ROOT_MAY_USE_MPI)
    # Whoever comes back slowly may cost another rollback.
    assert (tmp_path / "steps").read_text().split()[:2] == ["0", "4"], log
