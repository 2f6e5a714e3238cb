"""Commands of hvdrecover, called as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 400.0  # seconds for a command, on a machine that has much else to do
DRILL_PATIENCE = 2400.0  # a recovery takes most of a minute on a machine that is busy


def call(
    *words: object, environ: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """Call a command, and return what came of it."""
    return subprocess.run(
        [sys.executable, "-m", "hvdrecover", *map(str, words)],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


def call_json(*words: object, environ: Mapping[str, str] | None = None) -> Any:
    """Call a command that must succeed with ``--json``, and return its document."""
    done = call(*words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Drilled:
    """A drill that has ended: its exit code, its JSON, its text, and its folder."""

    code: int
    found: dict[str, Any]
    words: str
    folder: Path


def drill(folder: Path, *words: object) -> Drilled:
    """Drill a script on two ranks."""
    done = call("drill", "-np", 2, "--output", folder, *words, patience=DRILL_PATIENCE)
    assert (folder / "verdict.json").exists(), done.stderr
    return Drilled(done.returncode, json.loads((folder / "verdict.json").read_text()), done.stdout, folder)
