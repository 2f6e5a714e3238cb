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
    """A launcher such as ``horovodrun`` and all that it starts on this host.

    Every process of the job is known by a mark in its environment, which a launcher hands on to its workers;
    so even those that have left the launcher's process group are found.

    Args:
        command: the launcher and its arguments.
        log: file that takes the output of all processes.
        environ: variables on top of this process's own.
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
        """Return whether the launcher runs."""
        return self._launcher.poll() is None

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._launcher.pid

    def processes(self) -> list[int]:
        """The ids of the job's processes on this host, launcher included; none that has exited."""
        return processes.marked(self._mark)

    def wait(self, timeout: float) -> int:
        """Wait until the launcher exits.

        Args:
            timeout: seconds to wait.

        Returns:
            The launcher's exit code.

        Raises:
            HvdrecoverError: it still runs; the message holds the end of the log.
        """
        try:
            return self._launcher.wait(timeout)
        except subprocess.TimeoutExpired:
            raise HvdrecoverError(
                f"the job still runs after {timeout} s; its log ends with\n{self.tail()}"
            ) from None

    def kill(self, patience: float = waits.ALL_KILLED) -> list[int]:
        """SIGKILL the launcher and everything that it started, until all of it is gone.

        Args:
            patience: seconds to wait for the end of what was killed.

        Returns:
            The processes that can't be killed, which are named and left.
        """
        if self._launcher.poll() is None:
            self._launcher.kill()
        left = processes.kill_marked(self._mark, patience)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(min(patience, waits.KILLED))
        if left:
            logger.error("%s can't be killed, as a disk hangs perhaps: left", processes.named(left))
        return left

    def tail(self, lines: int = 25) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
