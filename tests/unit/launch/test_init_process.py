"""The first process of a container hands signals on, and waits for orphans."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from hvdrecover.launch import signals

SCRIPT = """
import os, signal, subprocess, sys, time
from contextlib import suppress
from pathlib import Path
from hvdrecover.launch.signals import run_below

def dead():
    states = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has gone meanwhile
            states.append(Path(f"/proc/{name}/stat").read_text())
    return [state for state in states if state.rpartition(")")[2].split()[0] == "Z"]

def job():
    assert os.getpid() != 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    for _ in range(5):
        subprocess.run(["sh", "-c", "sleep 0 & sleep 0 &"])
    while dead():
        time.sleep(0.01)
    os.kill(1, signal.SIGTERM)
    time.sleep(60)

sys.exit(run_below(job, [signal.SIGTERM]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give processes a process table of their own")
def test_the_first_process_waits_for_orphans_and_hands_signals_on() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare")
    space = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    done = subprocess.run([*space, sys.executable, "-c", SCRIPT], timeout=60, check=False)
    assert done.returncode == 75


def test_another_process_has_no_child() -> None:
    assert signals.run_below(os.getpid, []) == os.getpid()
