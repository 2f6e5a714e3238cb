"""Each rank's loader, losses and random streams return to the last bit when its process is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import run_job, static, supervised

SCRIPT = Path(__file__).with_name("scripts") / "own_streams.py"

pytestmark = pytest.mark.acceptance


def finish(folder: Path, launcher: list[str], **killed: int) -> list[dict[str, Any]]:
    """Run the script to its end; return the report of each rank."""
    folder.mkdir()
    environ = {"FOLDER": str(folder), "KILLED": json.dumps({step[1:]: rank for step, rank in killed.items()})}
    run_job([*launcher, sys.executable, str(SCRIPT)], folder / "log", environ)
    assert sorted(path.name for path in folder.glob("killed-*")) == sorted(f"killed-{s[1:]}" for s in killed)
    return [json.loads((folder / f"report-{rank}").read_text()) for rank in range(2)]


def test_ranks_killed_in_mid_epoch_get_their_very_own_back(tmp_path: Path) -> None:
    expected = finish(tmp_path / "undisturbed", static(2))
    assert expected[0]["losses"] != expected[1]["losses"]
    assert finish(tmp_path / "killed", supervised("--no-standby"), _8=1, _13=0) == expected
    for epoch in range(2):
        batches = [each["losses"][10 * epoch : 10 * epoch + 10] for each in expected]
        seen = sorted(sample for rank in batches for indices, _ in rank for sample in indices)
        assert seen == list(range(320))
