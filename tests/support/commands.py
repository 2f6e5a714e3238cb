"""Commands of hvdrecover, called as a user calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

PATIENCE = 400.0  # seconds for a command, on a machine that has much else to do


def call(*words: object, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Call a command, and return what came of it."""
    return subprocess.run(
        [sys.executable, "-m", "hvdrecover", *map(str, words)],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def call_json(*words: object, environ: Mapping[str, str] | None = None) -> Any:
    """Call a command that must succeed with ``--json``, and return its document."""
    done = call(*words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
