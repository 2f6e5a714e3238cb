"""Gradients that real ranks make together; each check's own text is in the script that the ranks run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from tests.integration.conftest import IS_LONG
from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "tensorflow_gradients.py"
ENVIRON = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **ROOT_MAY_USE_MPI}


def test_two_ranks_make_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    command = [*static(2), sys.executable, str(SCRIPT), "all" if IS_LONG else "first"]
    log = run_job(command, tmp_path / "log", ENVIRON, patience=3 * PATIENCE)
    found = [json.loads(line) for line in re.findall(r"outcome (\{.*\})", log)]
    problems = {each["check"]: each["problems"] for each in found}
    assert len(problems) >= 15
    assert {check: each for check, each in problems.items() if each} == {}
