"""Processes that can't be killed: they wait for a disk that hangs, here one that is frozen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.mounts import mounted
from tests.support.commands import wait_until
from tests.support.jobs import PREEMPTED, Job, read_events
from tests.unit.launch.children import is_alive, state, until

WRITE = "import os, sys; print(os.getpid(), flush=True); open(sys.argv[1], 'w').write('x')"


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[Path]:
    """A file on a disk on which nothing ever gets written."""
    if shutil.which("fsfreeze") is None:
        pytest.skip("there is no fsfreeze (Debian's util-linux)")
    with mounted("ext4", tmp_path / "disk", tmp_path / "image", 20 << 20) as disk:
        subprocess.run(["fsfreeze", "--freeze", disk.folder], check=True)
        try:
            yield disk.folder / "file"
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", disk.folder], check=True)


def stuck(process: int) -> int:
    until(lambda: state(process) == "D", f"process {process} is to wait for the disk")
    return process


def test_a_job_that_can_not_be_killed_is_left_and_named(
    hung: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job([sys.executable, "-c", WRITE, str(hung)], tmp_path / "log")
    stuck(job.pid)
    assert job.kill(patience=0.3) == [job.pid]
    assert f"process {job.pid} (python" in caplog.text
    assert is_alive(job.pid)


# As a training script that is killed in a commit. What it has printed may come late.
SCRIPT = """
import os, pathlib, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
open(sys.argv[2], "w").write("x")
"""


def test_a_preemption_on_a_disk_that_hangs_ends_with_75(hung: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    own = [sys.executable, "-m", "hvdrecover", "run", "-np", "1", "--grace", "1", "--no-standby", "--"]
    named = tmp_path / "process"
    command = [*own, sys.executable, str(script), str(named), str(hung)]
    job = Job(command, tmp_path / "log", {"HVDRECOVER_EVENTS": str(tmp_path / "events")})
    try:
        wait_until(lambda: named.exists() and named.read_text())  # two launchers have to be started before
        process = stuck(int(named.read_text()))
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(120) == PREEMPTED
        assert state(process) == "D"  # still: nobody has waited for its end
        assert job.processes() == [process]
        assert f"process {process} (python) can't be killed" in job.tail()
        # Of the guardian, or of its supervisor as well.
        found = read_events(tmp_path / "events", "unkillable")
        assert found
        assert all(event["processes"] == [process] for event in found)
    finally:
        job.kill(patience=0.3)
