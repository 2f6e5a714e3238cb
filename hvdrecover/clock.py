"""Time as an argument, so that tests need not sleep."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """The package's source of time; all values are in seconds."""

    def now(self) -> float:
        """Wall-clock time since the Unix epoch."""

    def monotonic(self) -> float:
        """Time that never goes back, from an arbitrary start."""

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait until ``event`` is set or ``timeout`` has passed; return whether it is set."""


class SystemClock:
    """The machine's clock."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait until ``event`` is set or ``timeout`` has passed; return whether it is set."""
        return event.wait(timeout)


SYSTEM_CLOCK = SystemClock()
