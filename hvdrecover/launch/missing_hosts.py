"""Log lines about hosts that a job waits for: too few processes are left, or ssh cannot reach a host."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Collection, Mapping

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.discovery import checks, programs
from hvdrecover.discovery.checks import Checks
from hvdrecover.errors import HvdrecoverError
from hvdrecover.launch import horovodrun, waits
from hvdrecover.launch.horovodrun import Options

_SHORTAGE_PATIENCE = 10.0  # seconds for a guardian of a spare host, or of a host that returns at once
_SSH_PATIENCE = 8.0  # seconds from the start for guardians to connect
_MOST = 64  # maximum number of hosts to try


class Shortage:
    """Notices that an attempt has lost processes, and that no others have replaced them."""

    def __init__(self, options: Options, clock: Clock = SYSTEM_CLOCK) -> None:
        self._wanted = options.processes
        self._reports = options.least is None and not options.mpi
        self._clock = clock
        self._was_full = False
        self._since: float | None = None

    def message(self, present: int) -> str:
        """Return a message for people, once; '' if there is nothing to report."""
        if present >= self._wanted:
            self._was_full = True
        if not (self._reports and self._was_full and 0 < present < self._wanted):
            self._since = None
            return ""
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since < _SHORTAGE_PATIENCE:
            return ""
        self._reports = False
        return (
            f"{present} of {self._wanted} processes are left; the job waits until {self._wanted} run again, "
            f"up to Horovod's --elastic-timeout. With --min-np {present} it would resume with what is left"
        )


class Unreachable:
    """Tries ssh, once, to each host without a connected guardian."""

    def __init__(
        self, options: horovodrun.Options, environ: Mapping[str, str], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._options = options
        self._environ = environ
        self._clock = clock
        self._due: float | None = clock.monotonic() + _SSH_PATIENCE
        self._found: list[str] = []

    def news(self, present: Collection[str]) -> list[str]:
        """Return a message about each unreachable host, once."""
        if self._due is not None and self._clock.monotonic() >= self._due:
            self._due = None
            # Daemon threads: resolving a name may take long, and the job may end meanwhile.
            threading.Thread(target=self._look, args=(set(present),), daemon=True).start()
        found, self._found = self._found, []
        return found

    def _look(self, present: set[str]) -> None:
        try:
            named = [host for host in horovodrun.known(self._options) if host not in present]
        except HvdrecoverError:  # discovery failed, which Horovod's driver reports
            return
        for host in named[:_MOST]:
            threading.Thread(target=self._try, args=(host,), daemon=True).start()

    def _try(self, host: str) -> None:
        if checks.is_local(host) or shutil.which("ssh", path=self._environ["PATH"]) is None:
            return
        asked = Checks(self._options.ssh_port, self._options.identity, "true")
        try:
            programs.output(checks.command_on(host, asked, here=False), self._environ, waits.SSH)
        except HvdrecoverError as error:
            remedy = f"Check that its name is right, that it is up, and that `ssh {host} true` works"
            self._found.append(f"host {host} can't be reached: {error}. {remedy}")
