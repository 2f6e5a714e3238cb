"""The deadlines of all waits, in seconds; those of training processes follow from their pages."""

from __future__ import annotations

import math

from hvdrecover.config import Config
from hvdrecover.heartbeat import Phase, Reading

# Guardian
LOOK = 0.2  # between looks at the page of the training process
DISMISSAL = 45.0  # for the supervisor to end the job, when an error of the script is to end it
STACKS = 1.0  # for a training process to write down its stacks
OUTPUT = 2.0  # for a slow reader of output to make room; less than any hang timeout
LAST_OUTPUT = 20.0  # for a slow reader of output to take anything when the process ends

# Supervisor
SUPERVISION = 0.5  # between looks at horovodrun
LAST_WORDS = 1.0  # for guardians to obey before all is killed
LINGERING = 60.0  # for horovodrun to end when the training is finished and all guardians have gone
SPARE = 10.0  # for a guardian of a spare host, or of a host that returns at once, to replace a lost one
CULPRIT = 2.0  # for the process whose loss failed the others to be reported
HEARSAY = 10.0  # for the rank that had an error to report it, when others have
CONTROLLER = 30.0  # for Slurm's controller, which may be busy
BETWEEN_QUESTIONS = 10.0  # between questions to Slurm's controller

# Both
MESSAGE = 5.0  # for the other side to take a message, or to say who it is; and for a connection, with its DNS
DISK = 5.0  # for a disk to take a line, such as an event
KILLED = 5.0  # for a killed process to end; one that waits for a disk may never do so
ALL_KILLED = 30.0  # for all processes of a job to end that were killed
DISCOVERY = 60.0  # for a discovery script, while Horovod's driver can do nothing about hosts

# -- training processes --------------------------------------------------------------------------------

HANG_FACTOR = 5  # a process hangs after this many times the longest time without progress seen so far
_LEAST_LIMIT = 300.0
_WAKING = 10.0  # for a standby that was woken to run its program; it has imported everything
_AFTERWARDS = 86400.0  # for the script's own work after its training function has returned


def hang_limit(reading: Reading, config: Config, *, joins: bool = True) -> float:
    """Return how many seconds a process may go without progress now; infinite without a limit."""
    # A script that is not known to import hvdrecover (`joins`) may never be able to report progress.
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
            longest = config.hang_timeout or max(config.startup_timeout, HANG_FACTOR * reading.longest)
            return longest if reading.steps else math.inf
        case Phase.TRAINING | Phase.LEFT | Phase.REMOVED if not reading.waiting:
            return _training_limit(reading, config)
        case Phase.BEGINNING if reading.longest and not reading.waiting:
            return _beginning_limit(reading, config)
    return max(config.startup_timeout, config.hang_timeout or 0.0)


def _training_limit(reading: Reading, config: Config) -> float:
    return config.hang_timeout or max(_LEAST_LIMIT, HANG_FACTOR * reading.longest)


def _beginning_limit(reading: Reading, config: Config) -> float:
    """Return how many seconds may pass from an agreement to the next commit."""
    # Functions may be compiled again there, whatever the hang timeout; that takes as long as at first.
    return max(_training_limit(reading, config), HANG_FACTOR * reading.longest)


def stalls(reading: Reading, config: Config) -> tuple[int, int]:
    """Return the seconds that ranks wait for a silent one, in training and in a beginning; 0: no limit."""
    training = stall_seconds(_training_limit(reading, config))
    return training, stall_seconds(_beginning_limit(reading, config)) if reading.longest else 0


def stall_seconds(timeout: float) -> int:
    """Return after how many seconds other ranks' collectives fail, before these ranks count as hanging."""
    # Horovod takes up to two check intervals longer for a cached tensor: in all 5/8 of the timeout. The rest
    # is for the framework to raise the error; TensorFlow may need a second.
    return max(1, int(timeout * 3 / 8))
