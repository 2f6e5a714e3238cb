"""The line about a job that waits for hosts, though it could resume with what is left."""

from __future__ import annotations

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.launch.horovodrun import Options

_PATIENCE = 10.0  # seconds for a spare host's guardian, or one whose host comes back at once


class Shortage:
    """Notices that a start has lost processes, and that none have come in their place.

    Args:
        options: the job's; if they say how few processes suffice, nothing is reported.
        clock: where times come from.
    """

    def __init__(self, options: Options, clock: Clock = SYSTEM_CLOCK) -> None:
        self._wanted = options.processes
        self._reports = options.least is None and not options.mpi
        self._clock = clock
        self._was_full = False
        self._since: float | None = None

    def message(self, present: int) -> str:
        """Return a message for people, once; an empty string if there is nothing to report.

        Args:
            present: how many guardians there are now.
        """
        if present >= self._wanted:
            self._was_full = True
        if not (self._reports and self._was_full and 0 < present < self._wanted):
            self._since = None
            return ""
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < _PATIENCE:
            return ""
        self._reports = False
        return (
            f"{present} of {self._wanted} processes are left; the job waits until {self._wanted} run again, "
            f"up to Horovod's --elastic-timeout. With --min-np {present} it would resume with what is left"
        )
