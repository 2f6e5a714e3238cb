"""``hvdrecover drill`` as a person runs it, and its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 2400  # seconds; a recovery takes most of a minute on a machine that is busy
QUICK = ("--epochs", "2", "--step-seconds", "0.1", "--commit-every", "2")
KILL_ALL = ("--faults", "kill-all", "--no-standby", "--")


@dataclass(frozen=True)
class Drilled:
    """A drill that has ended: its exit code, its JSON, its text, and its folder."""

    code: int
    found: dict[str, Any]
    words: str
    folder: Path


def drill(folder: Path, *words: str) -> Drilled:
    command = [sys.executable, "-m", "hvdrecover", "drill", "-np", "2", "--output", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (folder / "verdict.json").exists(), done.stderr
    return Drilled(done.returncode, json.loads((folder / "verdict.json").read_text()), done.stdout, folder)
