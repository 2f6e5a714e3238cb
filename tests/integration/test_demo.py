"""The demo, as a user runs it: a drill of the digits example with three faults."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.integration.conftest import LONG

DEMO = Path(__file__).parents[2] / "scripts" / "demo"


@LONG
def test_the_demo_shows_three_faults_and_the_same_weights(tmp_path: Path) -> None:
    command = [str(DEMO), "--output", str(tmp_path / "drill")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("verdict: the script recovers\n")
    for fault in ("kill", "stop", "kill-supervisor"):
        assert re.search(rf"^{fault} +1 +1  \d+\.\d s$", done.stdout, re.MULTILINE)
    assert re.search(r"^[1-9]\d* commits compared bit by bit", done.stdout, re.MULTILINE)
    assert "0 samples lost or repeated" in done.stdout
