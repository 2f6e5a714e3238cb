"""Retries of storage that has failed: how many, and with what pauses."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hvdrecover.clock import Clock
from hvdrecover.errors import StorageError

ATTEMPTS = 5  # where somebody waits for the result: 4 to 8 seconds of pauses

P = ParamSpec("P")
T = TypeVar("T")

# A private generator: drawing from the global one would change the numbers that the script draws.
_dice = random.Random()


class retrying:  # noqa: N801
    """Repeats a call after each `StorageError`: ``retrying(clock)(function, *arguments)``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        for attempt in range(1, ATTEMPTS):
            try:
                return function(*args, **kwargs)
            except StorageError:
                self._clock.wait(threading.Event(), pause_before(attempt))
        return function(*args, **kwargs)


def retry_delay(attempt: int) -> float:
    """Return how many seconds to wait at most before the ``attempt``-th retry, from 1."""
    return min(30.0, 0.5 * 2.0 ** min(attempt - 1, 10))


def pause_before(attempt: int) -> float:
    # Up to half is taken off at random: jobs that lost one storage together should not come back together.
    return retry_delay(attempt) * _dice.uniform(0.5, 1.0)
