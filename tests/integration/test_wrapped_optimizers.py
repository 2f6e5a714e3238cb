"""Jobs whose optimizers, or whose gradients, Horovod's wrapper does not average by itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import run_job, static

SCRIPT = Path(__file__).with_name("scripts") / "wrapped_optimizers.py"
KINDS = ["plain", "adam", "passes", "frozen", "channels_last", "bfloat16"]


def test_ranks_stay_alike_with_frozen_layers_and_other_kinds_of_tensors(tmp_path: Path) -> None:
    command = [*static(2), sys.executable, str(SCRIPT), str(tmp_path), *KINDS]
    run_job(command, tmp_path / "log", {"OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = {}
    for kind in KINDS:
        found[kind], other = [json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(2)]
        assert other == found[kind], kind
    assert found["frozen"] != found["plain"]
    assert found["channels_last"] == pytest.approx(found["plain"], abs=1e-5)
    assert found["bfloat16"] == pytest.approx(found["plain"], abs=0.05)
