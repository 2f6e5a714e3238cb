"""Time that passes only when somebody waits for it."""

from __future__ import annotations

import threading


class FakeClock:
    """A clock that never sleeps: waiting moves it on, and is noted.

    Attributes:
        waits: the timeouts that were asked for, in seconds.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._time = start
        self.waits: list[float] = []

    def now(self) -> float:
        return self._time

    def monotonic(self) -> float:
        return self._time

    def advance(self, seconds: float) -> None:
        self._time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.waits.append(timeout)
        if not event.is_set():
            self._time += timeout
        return event.is_set()
