"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(reached: Callable[[], object], seconds: float = 200) -> None:
    """Wait for what is sure to come, though processes of low priority may wait long for a busy processor."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)
