"""What became of a training process, and what follows from it; pure functions."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Phase, Reading

Fault = Literal[
    "crash", "hang", "out_of_memory", "preemption", "lost_host", "launcher_lost", "script_error", "early_exit"
]
OF_HOSTS = ("crash", "hang", "out_of_memory")  # which may come of the host, and happen again there
# Errors that come of other ranks' faults, wherever the script meets them.
_OF_OTHERS = ("Horovod initialization failed", "HorovodInternalError", "HostsUpdatedInterrupt")
BUDGET = 3  # deaths without a commit in between


@dataclass(frozen=True)
class Death:
    """The end of a training process.

    Attributes:
        returncode: as `subprocess` has it: negative for a signal.
        reading: what its page said last.
        hung: whether its guardian killed it because it was hanging.
        out_of_memory: whether the kernel has killed for lack of memory meanwhile.
        error: the error that ended it, or an empty string.
    """

    returncode: int
    reading: Reading
    hung: bool = False
    out_of_memory: bool = False
    error: str = ""

    @property
    def commit(self) -> tuple[int, int]:
        """Generation and number of the commit that it was at."""
        return self.reading.generation, self.reading.commit


Verdict = Literal["finished", "left", "removed", "told", "lost"]


def verdict(death: Death) -> Verdict:
    """Whether a process came to a good end.

    Returns:
        ``finished`` if its work is done, ``left`` if it has left after a preemption, ``removed`` if its host
        is no longer part of the job, ``told`` if it was ended by SIGTERM, which Horovod sends to what it no
        longer needs, ``lost`` otherwise.
    """
    phase = death.reading.phase
    if death.returncode == 0 and phase in (Phase.FINISHED, Phase.UNKNOWN):
        return "finished"
    if phase == Phase.REMOVED:
        return "removed"
    if phase == Phase.LEFT or (death.returncode == PREEMPTED and death.reading.stop):
        return "left"
    return "told" if death.returncode == -signal.SIGTERM else "lost"


def fault(death: Death) -> Fault:
    """What kind of fault a lost process died of."""
    if death.hung:
        return "hang"
    if death.returncode == 0:
        return "early_exit"
    if death.returncode == -signal.SIGKILL and death.out_of_memory:
        return "out_of_memory"
    of_others = any(text in death.error for text in _OF_OTHERS)
    return "script_error" if death.returncode > 0 and not of_others else "crash"


def is_apart(death: Death) -> bool:
    """Whether it hung where ranks wait for each other to meet, so that nobody knows who is to blame."""
    return death.hung and death.reading.phase in (Phase.STARTING, Phase.RECOVERING)


def is_same_error(death: Death, before: Death | None) -> bool:
    """Whether the script has failed twice in a row in the same way at the same place: it will again."""
    return (
        before is not None
        and fault(death) == fault(before) == "script_error"
        and (death.returncode, death.error) == (before.returncode, before.error)
        and death.reading.commit == before.reading.commit
        and death.reading.steps == before.reading.steps
    )


def may_restart(deaths: int, death: Death, before: Death | None) -> str:
    """Why a process is not restarted in place; an empty string if it is.

    Args:
        deaths: deaths in a row without a commit in between, this one included.
        death: this death.
        before: the one before it, if there was no commit in between.
    """
    if death.reading.phase == Phase.FINISHED:
        return "the other ranks have finished and can't be met again"
    if is_same_error(death, before):
        return "the script has failed twice in the same way at the same commit"
    if deaths >= BUDGET:
        return f"{deaths} deaths in a row without a commit in between"
    return ""
