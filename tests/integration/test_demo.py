"""The demo, as ``scripts/demo`` runs it; 40 s, and more beside other tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.integration.conftest import LONG


@LONG
def test_the_demo_shows_three_faults_and_leaves_nothing(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "hvdrecover.examples.demo", "--keep", str(tmp_path / "kept")]
    environ = {**os.environ, "TMPDIR": str(temporary), "COLUMNS": "100"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for fault in ("worker killed", "worker hangs", "all killed"):
        assert re.search(rf"{fault} .* \d+\.\d s .* samples", done.stdout)
    assert "The weights are the same, bit by bit." in done.stdout
    assert list(temporary.iterdir()) == []
    assert (tmp_path / "kept" / "killed" / "events").is_dir()
