"""Time that passes only when somebody waits for it."""

from __future__ import annotations

import math
import threading
import time

from hvdrecover.machine import Clock

HANG_SECONDS = 30.0  # of real time; only reached when something is broken


class FakeClock(Clock):
    """A clock that never sleeps: waiting moves it on, and is noted."""

    def __init__(self, start: float = 1000.0) -> None:
        self.seconds = start
        self.waits: list[float] = []  # the timeouts that were asked for, in seconds

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.waits.append(timeout)
        if not event.is_set():
            self.seconds += timeout
        return event.is_set()


class SharedClock(FakeClock):
    """The clock of a thread that trains, whose waits don't move the time on, and of the writer beside it."""

    def __init__(self, start: float = 1000.0) -> None:
        super().__init__(start)
        self._owner = threading.get_ident()
        # Number of the writer's pauses that still pass at once. Then, one lasts until it is cut short, or
        # somebody moves the time on.
        self.pauses: float = math.inf
        self.in_pause = threading.Event()
        self.impatient = False  # whether the waits of the thread that made the clock pass at once as well

    def wait(self, event: threading.Event, timeout: float) -> bool:
        if threading.get_ident() == self._owner:
            if self.impatient:
                return super().wait(event, timeout)
            return self._last(event, self.seconds + timeout)
        if self.pauses > 0:
            self.pauses -= 1
            return super().wait(event, timeout)
        self.waits.append(timeout)
        end = self.seconds + timeout  # before anybody is told, who may move the time on at once
        self.in_pause.set()
        try:
            return self._last(event, end)
        finally:
            self.in_pause.clear()

    def _last(self, event: threading.Event, end: float) -> bool:
        give_up = time.monotonic() + HANG_SECONDS
        while self.seconds < end and not event.wait(0.001):
            assert time.monotonic() < give_up, "nobody has ended this wait"
        return event.is_set()
