"""The limits after which a training process counts as hanging; pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdrecover.heartbeat import Phase, Reading

_FLOOR = 300.0
FACTOR = 5.0  # a process hangs after this many times the longest time without progress seen so far
_STARTUP = 3600.0
_WAKING = 10.0  # seconds for a standby that was woken to run its program; it has imported everything
_AFTERWARDS = 86400.0  # seconds for the script's own work after its training function has returned


@dataclass(frozen=True)
class Limits:
    """The user's limits on time without progress."""

    timeout: float | None = None  # seconds in training, or None for a multiple of the longest that was seen
    # seconds until the first commit, in a recovery, and after a pause until there is progress. Once the time
    # until a first commit is known, later beginnings are judged by that time.
    startup: float = _STARTUP


def limit(reading: Reading, limits: Limits, *, joins: bool = True) -> float:
    """Return how many seconds a process may go without progress now; infinite for a process without a limit.

    `joins` says whether the process is known to import hvdrecover. The first process of a script that never
    imports it has no limit: it cannot report progress.
    """
    if reading.paused or (reading.phase == Phase.UNKNOWN and not joins):
        return math.inf
    match reading.phase:
        case Phase.READY:
            return _WAKING
        case Phase.FINISHED:
            return _AFTERWARDS
        case Phase.PLAIN:
            # A plain script may evaluate for an hour without a call of ours. Before its first step, it cannot
            # show progress at all.
            longest = limits.timeout or max(limits.startup, FACTOR * reading.longest)
            return longest if reading.steps else math.inf
        case Phase.TRAINING | Phase.LEFT | Phase.REMOVED if not reading.waiting:
            return training_limit(reading.longest, limits)
        case Phase.BEGINNING if reading.longest_beginning and not reading.waiting:
            return beginning_limit(reading, limits)
    return max(limits.startup, limits.timeout or 0.0)


def training_limit(longest: float, limits: Limits) -> float:
    return limits.timeout if limits.timeout is not None else max(_FLOOR, FACTOR * longest)


def beginning_limit(reading: Reading, limits: Limits) -> float:
    """Return how many seconds may pass from an agreement to the next commit.

    Compiling again takes about as long as it took in earlier beginnings.
    """
    return max(training_limit(reading.longest, limits), FACTOR * reading.longest_beginning)


def stalls(reading: Reading, limits: Limits) -> tuple[int, int]:
    """Return the seconds that ranks wait for a silent one, in training and in a beginning; 0: no limit."""
    training = stall_seconds(training_limit(reading.longest, limits))
    known = reading.longest_beginning > 0
    return training, stall_seconds(beginning_limit(reading, limits)) if known else 0


def is_hanging(reading: Reading, limits: Limits, *, joins: bool = True) -> bool:
    return reading.silent > limit(reading, limits, joins=joins)


def stall_seconds(timeout: float) -> int:
    """Return after how many seconds other ranks' collectives fail, well before their ranks count as hanging.

    Horovod takes up to two check intervals longer for a cached tensor: in all 5/8 of the timeout. The rest is
    for the framework to raise the error; TensorFlow may need a second.
    """
    return max(1, int(timeout * 3 / 8))


def check_seconds(timeout: float) -> int:
    """Return the interval at which Horovod checks for missing ranks."""
    return max(1, int(timeout / 8))


def collective_seconds(timeout: float | None, default: int) -> int:
    """Return the timeout of Horovod's network operations, in seconds."""
    return default if timeout is None else max(1, min(default, int(timeout / 2)))
