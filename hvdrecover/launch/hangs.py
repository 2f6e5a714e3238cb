"""The limits after which a training process counts as hanging; pure functions."""

from __future__ import annotations

import math

from hvdrecover.config import Config
from hvdrecover.heartbeat import Phase, Reading

_FLOOR = 300.0
FACTOR = 5.0  # a process hangs after this many times the longest time without progress seen so far
_WAKING = 10.0  # seconds for a standby that was woken to run its program; it has imported everything
_AFTERWARDS = 86400.0  # seconds for the script's own work after its training function has returned


def limit(reading: Reading, config: Config, *, joins: bool = True) -> float:
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
            longest = config.hang_timeout or max(config.startup_timeout, FACTOR * reading.longest)
            return longest if reading.steps else math.inf
        case Phase.TRAINING | Phase.LEFT | Phase.REMOVED if not reading.waiting:
            return training_limit(reading.longest, config)
        case Phase.BEGINNING if reading.longest and not reading.waiting:
            return beginning_limit(reading.longest, config)
    return max(config.startup_timeout, config.hang_timeout or 0.0)


def training_limit(longest: float, config: Config) -> float:
    return config.hang_timeout if config.hang_timeout is not None else max(_FLOOR, FACTOR * longest)


def beginning_limit(longest: float, config: Config) -> float:
    """Return how many seconds may pass from an agreement to the next commit.

    Functions may be compiled again there, whatever the hang timeout; that takes as long as at the first time.
    """
    return max(training_limit(longest, config), FACTOR * longest)


def stalls(reading: Reading, config: Config) -> tuple[int, int]:
    """Return the seconds that ranks wait for a silent one, in training and in a beginning; 0: no limit."""
    training = stall_seconds(training_limit(reading.longest, config))
    return training, stall_seconds(beginning_limit(reading.longest, config)) if reading.longest else 0


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
