"""A processor that computes wrong gradients is found by a replay, before the step is applied."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.jobs import run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "faulty_processor.py"
FIRST_WRONG = 4  # step

pytestmark = pytest.mark.acceptance


def test_the_rank_with_wrong_gradients_is_named_and_the_step_is_not_applied(tmp_path: Path) -> None:
    run_job([*static(3), sys.executable, str(SCRIPT), str(tmp_path)], tmp_path / "log")
    for rank in range(3):
        outcome = json.loads((tmp_path / f"outcome-{rank}.json").read_text())
        assert (outcome["error"], outcome["steps"]) == ("DivergedError", FIRST_WRONG)
        assert "wrong on rank 2" in outcome["text"]
        assert "gradient of 0.weight" in outcome["text"]
