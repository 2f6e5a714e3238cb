"""A watch on the launcher that has started a guardian."""

from __future__ import annotations

import os
import select
import socket
import stat

from hvdrecover.bounded import Bounded
from hvdrecover.clock import Clock
from hvdrecover.launch import waits

_EVERY = 2.0  # seconds between looks at the driver
_REFUSALS = 2  # in a row, for the driver to be gone


class LauncherWatch:
    """Watches for the end of Horovod's driver, on this host or another one."""

    def __init__(self, rendezvous: tuple[str, int] | None, timeout: float, clock: Clock) -> None:
        self._rendezvous = rendezvous
        self._timeout = timeout
        self._clock = clock
        self._answered = self._looked = clock.monotonic()
        self._refusals = 0
        self._connect = Bounded(waits.DRIVER)

    def lost(self) -> str:
        """Return why the launcher counts as lost; '' if it does not."""
        if output_is_closed():
            return "nobody reads its output any more"
        if self._rendezvous is not None and self._clock.monotonic() - self._looked >= _EVERY:
            self._look(self._rendezvous)
        if self._refusals >= _REFUSALS:
            return "Horovod's driver is gone"
        if self._rendezvous is not None and self._clock.monotonic() - self._answered > self._timeout:
            return f"Horovod's driver has not answered for {self._timeout:g} s: this host is cut off"
        return ""

    def _look(self, rendezvous: tuple[str, int]) -> None:
        try:
            self._connect(socket.create_connection, rendezvous, timeout=waits.DRIVER).close()
        except ConnectionRefusedError:
            self._refusals += 1
        except OSError:
            self._refusals = 0
        else:
            self._refusals = 0
            self._answered = self._clock.monotonic()
        self._looked = self._clock.monotonic()
        if self._refusals:
            self._answered = self._looked


def output_is_closed(descriptor: int = 1) -> bool:
    """Return whether this output goes to a process that has closed it."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
