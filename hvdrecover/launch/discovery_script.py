"""The host discovery script, which Horovod's driver asks each second: here, at the price of a shell.

Horovod 0.28.1 starts two Python processes for each question, for 70 ms of processor time.
"""

from __future__ import annotations

import subprocess
from typing import Any

from hvdrecover import config
from hvdrecover.launch import processes


def begin(command: str, stderr: int | None = None) -> processes.Child:
    """Start a script's command in a shell, which dies with this process.

    Args:
        command: what prints a line for each host, to a pipe.
        stderr: as for `subprocess.Popen`.
    """
    return processes.start(
        ["/bin/sh", "-c", command],
        config.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
    )


def ask_by_shell(script: Any) -> None:
    """Have a class of scripts run its command in a shell, without a process in between.

    Args:
        script: Horovod's class, which is changed.
    """
    script._execute_discovery_script = _printed


def _printed(self: Any) -> str:
    """Return what a script prints.

    Raises:
        RuntimeError: it has failed; Horovod's driver reports that, and asks again.
    """
    command: str = self._discovery_script
    child = begin(command)
    printed, _ = child.communicate()
    if child.returncode != 0:
        end = processes.describe(child.returncode)
        raise RuntimeError(f"the host discovery script `{command}` has ended with {end}")
    return printed.decode()
