"""``horovodrun`` without its stack traces; started by the supervisor.

When workers fail, ``horovodrun`` raises an error that nobody catches, and prints twenty lines of its own
code. What has failed was told by the guardian that saw it.
"""

from __future__ import annotations

import importlib
import sys

from hvdrecover import config
from hvdrecover.elastic import temporary
from hvdrecover.launch.processes import die_with_parent

_WORKERS_FAILED = "one or more processes exited with non-zero status"  # their guardians have said why


def main() -> None:
    """Run ``horovodrun`` with this process's arguments."""
    die_with_parent()
    temporary.watch(config.read(), "horovodrun")
    sys.argv[0] = "horovodrun"
    launch = importlib.import_module("horovod.runner.launch")
    try:
        launch.run_commandline()
    except Exception as error:
        summary = next(iter(str(error).strip().splitlines()), type(error).__name__)
        sys.exit(1 if _WORKERS_FAILED in summary else f"horovodrun: {summary}")


if __name__ == "__main__":
    main()
