"""A real supervisor for stub guardians: ``python -m benchmarks.guardians.supervised FOLDER COUNT …``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

from hvdrecover import config
from hvdrecover.launch import supervisor
from hvdrecover.launch.horovodrun import Options


def main(folder: Path, arguments: list[str]) -> int:
    """Supervise a job of one worker, which is all the stub guardians."""
    worker = (sys.executable, "-m", "benchmarks.guardians.stubs")
    settings = replace(config.read(), events=folder, max_restarts=0)
    with mock.patch.object(supervisor, "WORKER", worker):
        return supervisor.Supervisor(arguments, Options(1), {}, settings).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
