"""Threads that let training go first."""

from __future__ import annotations

import contextlib
import os
import threading

BACKGROUND = 17  # training goes first, at a ratio of 45 to 1 for a core


def step_back(niceness: int = BACKGROUND) -> None:
    """Let training go before this thread and those that it starts; on Linux niceness is a thread's own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))
