"""A guardian with a real process of a script, without Horovod."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.launch.children import environment, until
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

# The first process prints until nobody reads it any more, the second finishes.
BLOCKS_IN_ITS_OUTPUT = """
import os, sys
from pathlib import Path
import adapter
from hvdrecover import heartbeat
heartbeat.committed(1, 1, 1)
if not Path("blocked").exists():
    Path("blocked").touch()
    while True:
        os.write(2, b"x" * 4096)
Path("restarted").touch()
heartbeat.enter(heartbeat.Phase.FINISHED)
"""

# The first process dies, the second finishes.
DIES_ONCE = """
import os, signal
from pathlib import Path
import adapter
from hvdrecover import heartbeat
heartbeat.committed(1, 1, 1)
if not Path("died").exists():
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
heartbeat.enter(heartbeat.Phase.FINISHED)
"""


def guard(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The end of a guardian of this script, in a folder."""
    with start(folder, script, *options) as guardian:
        printed, errors = guardian.communicate(timeout=120)
        return subprocess.CompletedProcess(guardian.args, guardian.returncode, printed, errors)


def start(folder: Path, script: str, *options: str) -> subprocess.Popen[str]:
    """A guardian of this script, in a folder, with its output in pipes."""
    words = [sys.executable, "-m", "hvdrecover", "worker", "--no-standby", *options, "--"]
    return subprocess.Popen(
        [*words, sys.executable, str(write(folder, script))],
        env={**environment(), "HOROVOD_ELASTIC": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_restarted_process_that_hangs_before_it_imports_hvdrecover_is_killed(tmp_path: Path) -> None:
    done = guard(tmp_path, HANGS_AT_ITS_RESTART, "--startup-timeout", "5")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "starts").read_text()) == 3
    assert done.stderr.count("hang (SIGKILL)") == 1


def test_a_process_that_blocks_the_output_of_its_guardian_is_killed_as_hanging(tmp_path: Path) -> None:
    with start(tmp_path, BLOCKS_IN_ITS_OUTPUT, "--hang-timeout", "5") as guardian:
        until(
            lambda: (tmp_path / "restarted").exists() or guardian.poll() is not None, "it is to be restarted"
        )
        _, errors = guardian.communicate(timeout=60)
    assert guardian.returncode == 0
    assert errors.count("hang (SIGKILL)") == 1


def test_a_disk_that_hangs_under_the_events_does_not_keep_a_guardian_from_its_work(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    # The pipe has no reader, so opening it to write blocks forever, as on a disk that hangs.
    hanging = 'mkfifo "$HVDRECOVER_EVENTS/run.jsonl" && exec "$@"'
    words = [sys.executable, "-m", "hvdrecover", "worker", "--no-standby", "--"]
    facts = {"HOROVOD_ELASTIC": "1", "HOROVOD_HOSTNAME": "node-7", "HVDRECOVER_EVENTS": str(events)}
    done = subprocess.run(
        ["sh", "-c", hanging, "sh", *words, sys.executable, str(write(tmp_path, DIES_ONCE))],
        env={**environment(), **facts},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert [file.is_fifo() for file in events.iterdir()] == [True]
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restarted in place") == 1
    assert done.stderr.count("events may be missing") == 1
