"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(reached: Callable[[], object], seconds: float = 200) -> None:
    """Wait for what is sure to come, though processes of low priority may wait long for a busy processor.

    A look that takes long, as at all processes or by a command, leaves the processors to the job after it.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if reached():
            return
        looked = time.monotonic()
        assert looked < deadline
        time.sleep(max(0.05, 2 * (looked - began)))
