"""The first process of a container, which has to wait for all processes that lose their parent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from types import FrameType


def run_below(function: Callable[[], int], signals: Iterable[int]) -> int:
    """Run a function, in a child if this is the first process of a container.

    Host discovery leaves a process behind at each look. An ordinary first process would never wait for these,
    until the container is full of dead ones.

    Args:
        function: returns an exit code.
        signals: those that are meant for the function, and handed on to it.

    Returns:
        The exit code, of a shell's kind if the child was killed.
    """
    if os.getpid() != 1:
        return function()
    wanted = set(signals)
    signal.pthread_sigmask(signal.SIG_BLOCK, wanted)  # until there is somebody to hand them on to
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
        return function()

    def hand_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    for number in wanted:
        signal.signal(number, hand_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, wanted)
    while True:
        process, status = os.wait()
        if process == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
