"""A guardian with a real process of a script, without Horovod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.launch.children import environment
from tests.unit.launch.scripts import write

# The first process dies, the second never comes to import hvdrecover, the third finishes.
HANGS_AT_ITS_RESTART = """
import os, signal
from pathlib import Path
starts = Path("starts")
start = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (start + 1))
if start == 1:
    signal.pause()
import adapter
from hvdrecover import heartbeat
heartbeat.committed(1, 1, 1)
if start == 0:
    os.kill(os.getpid(), signal.SIGKILL)
heartbeat.enter(heartbeat.Phase.FINISHED)
"""


def guard(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The end of a guardian of this script, in a folder."""
    words = [sys.executable, "-m", "hvdrecover", "worker", "--no-standby", *options, "--"]
    return subprocess.run(
        [*words, sys.executable, str(write(folder, script))],
        env={**environment(), "HOROVOD_ELASTIC": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_restarted_process_that_hangs_before_it_imports_hvdrecover_is_killed(tmp_path: Path) -> None:
    done = guard(tmp_path, HANGS_AT_ITS_RESTART, "--startup-timeout", "5")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "starts").read_text()) == 3
    assert done.stderr.count("hang (SIGKILL)") == 1
