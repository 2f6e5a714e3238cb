"""Fresh processes, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys

LAUNCHER_VARIABLES = ("HVDRECOVER_", "HOROVOD_", "OMPI_", "PMIX_", "PMI_", "MPI_", "MV2_", "JSM_")


def answer(code: str, given: str = "") -> str:
    """Return what a fresh process prints that no launcher started."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, input=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
