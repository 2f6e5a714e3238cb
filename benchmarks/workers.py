"""Two real workers over loopback, that run the module which measures them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.states import Setting
from hvdrecover.drill.run import Job
from hvdrecover.errors import HvdrecoverError
from tests.support.jobs import static

WORKERS = 2


def run(module: str, setting: Setting, patience: float) -> None:
    """Run ``python -m MODULE SIZE STATE FOLDER`` on each worker, and wait until all have ended.

    Raises:
        HvdrecoverError: the workers have failed, or have not ended in time.
    """
    worker = [sys.executable, "-m", module, setting.size, setting.state, str(setting.folder)]
    programs = os.pathsep.join([os.fspath(Path(sys.executable).parent), os.environ["PATH"]])
    threads = str(max(1, (os.cpu_count() or 1) // WORKERS))
    job = Job(
        [*static(WORKERS), *worker],
        setting.folder / "workers.log",
        {"PATH": programs, "OMP_NUM_THREADS": threads},
    )
    try:
        if job.wait(patience):
            raise HvdrecoverError(f"the workers failed; their log ends with\n{job.tail()}")
    finally:
        job.kill()
