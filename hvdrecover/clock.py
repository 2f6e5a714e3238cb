"""Time as an argument, so that tests need not sleep; and calls that are made for a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, ParamSpec, TypeVar

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
    """Makes calls, each in a daemon thread, and waits for each of them for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: Future[Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Make a call; raise `TimeoutError` if it, or one before it, is late."""
        result: Future[T] = Future()

        def call() -> None:
            try:
                result.set_result(function(*args, **options))
            except Exception as error:
                result.set_exception(error)

        with self._lock:
            # A late call continues in its thread. Until it ends, further calls fail at once. So a device that
            # hangs costs its caller the time only once, and one thread.
            if self._last is not None and not self._last.done():
                raise TimeoutError("an earlier call has still not returned")
            try:
                threading.Thread(target=call, daemon=True).start()
            except RuntimeError as error:  # there are as many as this process may have
                raise TimeoutError("no thread can be started") from error
            self._last = result
            if not wait([result], self._seconds).done:
                raise TimeoutError(f"no answer in {self._seconds:g} s")
            return result.result()
