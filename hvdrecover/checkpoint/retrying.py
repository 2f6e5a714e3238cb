"""Retries of storage that has failed: how many, and with what pauses."""

from __future__ import annotations

import random
import threading

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, stop_never

from hvdrecover.clock import Clock
from hvdrecover.errors import StorageError

ATTEMPTS = 5  # where somebody waits for the result: 4 to 8 seconds of pauses

# Of its own: tenacity's waits draw from the global generator, and would shift the user's random stream.
_dice = random.Random()


class WokenError(Exception):
    """A pause between two attempts was cut short."""


def retrying(
    clock: Clock, *, attempts: int | None = ATTEMPTS, wake: threading.Event | None = None
) -> Retrying:
    """Return a caller that repeats after each `StorageError`: ``retrying(clock)(function, *arguments)``.

    The pauses double from half a second to half a minute. Up to half of each is taken off at random, so that
    jobs that lost one storage together do not come back to it together. Any other error is raised at once.

    Args:
        clock: what pauses.
        attempts: how many calls to make before the last error is raised; None continues for ever.
        wake: when set, ends a pause with `WokenError`.
    """
    woken = wake or threading.Event()

    def pause(seconds: float) -> None:
        if clock.wait(woken, seconds):
            raise WokenError

    return Retrying(
        sleep=pause,
        stop=stop_never if attempts is None else stop_after_attempt(attempts),
        wait=_delay,
        retry=retry_if_exception_type(StorageError),
        reraise=True,
    )


def retry_delay(attempt: int) -> float:
    """Return how many seconds to wait at most before the ``attempt``-th retry, from 1."""
    return min(30.0, 0.5 * 2.0 ** (attempt - 1))


def _delay(state: RetryCallState) -> float:
    return retry_delay(state.attempt_number) * _dice.uniform(0.5, 1.0)
