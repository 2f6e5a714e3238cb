"""Training that is healthy but irregular is left alone; ranks that wait leave the processors to others."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.support.jobs import PATIENCE, read_events, run_job, supervised

SCRIPT = Path(__file__).with_name("scripts") / "irregular.py"
TIMEOUT = 20.0  # the limit for hangs

pytestmark = pytest.mark.acceptance


def test_slow_ranks_long_evaluations_and_long_phases_are_no_hangs(tmp_path: Path) -> None:
    """Set SOAK=600 for ten minutes of it."""
    soak = os.environ.get("SOAK", "30")
    settings = {"SECONDS": soak, "LONG": str(TIMEOUT * 1.25), "HVDRECOVER_EVENTS": str(tmp_path / "events")}
    command = [*supervised("--no-standby", "--hang-timeout", str(TIMEOUT)), sys.executable, str(SCRIPT)]
    environ = {**settings, "OMP_NUM_THREADS": "1"}
    log = run_job(command, tmp_path / "log", environ, patience=float(soak) + PATIENCE)
    kinds = {event["kind"] for event in read_events(tmp_path / "events")}
    assert "commit" in kinds
    shares = re.findall(r"computed for (\d+)%", log)
    assert len(shares) == 2 and all(int(share) < 25 for share in shares), shares  # they wait nearly always
    faults = {"fault", "reset", "restart", "structure", "diverged", "numerics", "missing_gradients"}
    assert not faults & kinds, log[-8000:]
