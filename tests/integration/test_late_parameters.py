"""Jobs whose optimizers, or whose parameters, Horovod's wrapper does not average by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import PATIENCE, Job, static, supervised

SCRIPT = Path(__file__).with_name("scripts") / "late_parameters.py"


def results(folder: Path, kills: list[int]) -> list[Any]:
    """Run the script; return the weights and learning rates of each rank."""
    folder.mkdir()
    command = [*supervised("--no-standby"), sys.executable, str(SCRIPT)]
    environ = {"REPORT": str(folder / "report"), "KILLS": json.dumps(kills), "OMP_NUM_THREADS": "1"}
    job = Job(command, folder / "log", environ)
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    for kill in kills:
        assert (folder / f"report.{kill}").exists()
    return [json.loads((folder / f"report-{rank}").read_text()) for rank in range(2)]


def test_kills_around_the_step_at_which_a_layer_joins_change_no_weight(tmp_path: Path) -> None:
    """The first kill goes back to before the layer joined; the second process finds it in the commit."""
    undisturbed = results(tmp_path / "undisturbed", [])
    assert undisturbed[0] == undisturbed[1]
    assert undisturbed[0][1][0] == pytest.approx(0.1 * 0.9**12)
    assert results(tmp_path / "killed", [5, 8]) == undisturbed


KINDS = ["plain", "closure", "adam", "lbfgs", "line_search", "passes"]
KINDS += ["unfrozen", "unfrozen_groups", "channels_last", "bfloat16"]


def test_ranks_stay_alike_with_closures_unfrozen_layers_and_other_kinds_of_tensors(tmp_path: Path) -> None:
    script = SCRIPT.with_name("wrapped_optimizers.py")
    command = [*static(2), sys.executable, str(script), str(tmp_path), *KINDS]
    job = Job(command, tmp_path / "log", {"OMP_NUM_THREADS": "1"})
    try:
        assert job.wait(PATIENCE) == 0, job.tail()
    finally:
        job.kill()
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind], other = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
        assert other == found[kind], kind
    assert found["closure"] == found["plain"]
    assert found["unfrozen"] == found["unfrozen_groups"] != found["plain"]
    assert found["channels_last"] == pytest.approx(found["plain"], abs=1e-5)
    assert found["bfloat16"] == pytest.approx(found["plain"], abs=0.05)
