"""A log line when a job waits because too few processes are left."""

from __future__ import annotations

import logging

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.launch.horovodrun import Options

logger = logging.getLogger(__name__)

_PATIENCE = 10.0  # seconds for a guardian of a spare host, or of a host that returns at once


class Shortage:
    """Notices that an attempt has lost processes, and that no others have replaced them."""

    def __init__(self, options: Options, clock: Clock = SYSTEM_CLOCK) -> None:
        self._wanted = options.processes
        self._reports = options.least is None and not options.mpi
        self._clock = clock
        self._was_full = False
        self._since: float | None = None

    def look(self, present: int) -> None:
        """Log a shortage, once."""
        self._was_full |= present >= self._wanted
        if not (self._reports and self._was_full and 0 < present < self._wanted):
            self._since = None
            return
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= _PATIENCE:
            self._reports = False
            logger.warning(
                f"{present} of {self._wanted} processes are left; the job waits until {self._wanted} run "
                f"again, up to Horovod's --elastic-timeout. With --min-np {present} it would resume with "
                "what is left"
            )
