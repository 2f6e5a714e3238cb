"""A whole job as a child: started, watched, and ended without leaving a process behind."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch import processes, waits

logger = logging.getLogger(__name__)

_MARK = "HVDRECOVER_JOB"


class Job:
    """A launcher such as ``horovodrun`` and all processes that it starts on this host.

    A mark in the environment identifies the job's processes, even outside the launcher's process group:
    launchers hand their environment to workers.
    """

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        self.log = log
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        with log.open("ab") as output:
            self._launcher = subprocess.Popen(
                list(command),
                env={**os.environ, **(environ or {}), name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self._launcher.poll() is None

    @property
    def pid(self) -> int:
        return self._launcher.pid

    def processes(self) -> list[int]:
        """Return the ids of the job's living processes on this host, launcher included."""
        return processes.marked(self._mark)

    def wait(self, timeout: float) -> int:
        """Wait for the launcher's exit code; after a timeout, raise `HvdrecoverError` with the log's end."""
        try:
            return self._launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            raise HvdrecoverError(
                f"the job still runs after {timeout} s; its log ends with\n{self.tail()}"
            ) from None

    def kill(self, patience: float = waits.ALL_KILLED) -> list[int]:
        """SIGKILL the launcher and all its processes; return and log those that cannot be killed."""
        if self._launcher.poll() is None:
            self._launcher.kill()
        left = processes.kill_marked(self._mark, patience)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(min(patience, waits.KILLED))
        if left:
            logger.error("%s can't be killed, as a disk hangs perhaps: left", processes.named(left))
        return left

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
