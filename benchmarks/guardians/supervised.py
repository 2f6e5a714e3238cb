"""A real supervisor for stub guardians: ``python -m benchmarks.guardians.supervised FOLDER COUNT …``."""

from __future__ import annotations

import sys
from pathlib import Path

from hvdrecover import config
from hvdrecover.launch.horovodrun import Options
from hvdrecover.launch.supervisor import Settings, Supervisor


def main(folder: Path, arguments: list[str]) -> int:
    """Supervise a job of one worker, which is all the stub guardians."""
    worker = (sys.executable, "-m", "benchmarks.guardians.stubs")
    settings = Settings(Options(1), worker, {}, folder, max_restarts=0)
    return Supervisor(arguments, settings, config.read()).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
