"""Time as an argument, so that tests need not sleep; and calls that are made for a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """The machine's clock, the package's source of time; all values are in seconds."""

    def now(self) -> float:
        """Return the wall-clock time since the Unix epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Return a time that never goes back, from an arbitrary start."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait until ``event`` is set or ``timeout`` has passed; return whether it is set."""
        return event.wait(timeout)


SYSTEM_CLOCK = Clock()


class Bounded:
    """Makes calls, each in a daemon thread, and waits for them for so many seconds.

    A call that is late continues in its thread. Until it ends, further calls fail at once. So a device that
    hangs costs its caller the time only once, and one thread.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def __call__(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make a call; return its result, or raise its exception.

        Raises:
            TimeoutError: the call, or one before it, is late.
        """
        with self._lock:
            return self._call(lambda: function(*args, **options))

    def _call(self, function: Callable[[], T]) -> T:
        if self._thread is not None and self._thread.is_alive():
            raise TimeoutError("an earlier call has still not returned")
        returned: list[T] = []
        raised: list[Exception] = []

        def call() -> None:
            try:
                returned.append(function())
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=call, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # there are as many as this process may have
            raise TimeoutError("no thread can be started") from error
        self._thread = thread
        thread.join(self._seconds)
        if raised:
            raise raised[0]
        if not returned:
            raise TimeoutError(f"no answer in {self._seconds:g} s")
        return returned[0]
