"""Gradients and optimizers of real ranks; each check of TensorFlow is told in the script that ranks run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import IS_LONG
from tests.support.jobs import PATIENCE, ROOT_MAY_USE_MPI, run_job, static

SCRIPTS = Path(__file__).with_name("scripts")
ENVIRON = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **ROOT_MAY_USE_MPI}


def test_two_ranks_make_the_gradients_of_the_whole_batch(tmp_path: Path) -> None:
    command = [
        *static(2),
        sys.executable,
        str(SCRIPTS / "tensorflow_gradients.py"),
        "all" if IS_LONG else "first",
    ]
    log = run_job(command, tmp_path / "log", ENVIRON, patience=3 * PATIENCE)
    found = [json.loads(line) for line in re.findall(r"outcome (\{.*\})", log)]
    problems = {each["check"]: each["problems"] for each in found}
    assert len(problems) >= 15
    assert {check: each for check, each in problems.items() if each} == {}


KINDS = ["plain", "closure", "adam", "lbfgs", "line_search", "passes"]
KINDS += ["unfrozen", "unfrozen_groups", "channels_last", "bfloat16"]


def test_ranks_stay_alike_with_closures_unfrozen_layers_and_other_kinds_of_tensors(tmp_path: Path) -> None:
    command = [*static(2), sys.executable, str(SCRIPTS / "wrapped_optimizers.py"), str(tmp_path), *KINDS]
    run_job(command, tmp_path / "log", {"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind], other = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
        assert other == found[kind], kind
    assert found["closure"] == found["plain"]
    assert found["unfrozen"] == found["unfrozen_groups"] != found["plain"]
    assert found["channels_last"] == pytest.approx(found["plain"], abs=1e-5)
    assert found["bfloat16"] == pytest.approx(found["plain"], abs=0.05)
