"""The ends of training processes, and what follows from them; pure functions."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import ends, processes
from hvdrecover.launch.ends import End

Fault = Literal[
    "crash", "hang", "out_of_memory", "preemption", "lost_host", "launcher_lost", "script_error", "early_exit"
]
OF_HOSTS = ("crash", "hang", "out_of_memory")  # which may come of the host, and happen again there
# Errors that come of other ranks' faults, wherever the script gets them.
_OF_OTHERS = ("Horovod initialization failed", "HorovodInternalError", "HostsUpdatedInterrupt")
SAME_ERROR = "the script has failed in the same way at the same place again"
BUDGET = 3  # deaths in a row without progress
_BRIEF = 100  # characters
_LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class Death:
    """The end of a training process.

    Attributes:
        returncode: as `subprocess` has it: negative for a signal.
        reading: what its page said last.
        hung: whether its guardian killed it because it was hanging.
        out_of_memory: whether the kernel has killed for lack of memory meanwhile.
        error: the error that ended it, or an empty string.
        kinds: what that error is, as `hvdrecover.error_kinds.kinds` said.
    """

    returncode: int
    reading: Reading
    hung: bool = False
    out_of_memory: bool = False
    error: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def cause(self) -> Cause:
        """Return what the script has failed of, and how far it had come."""
        return Cause(self.returncode, brief(self.words), self.reading.point)

    @property
    def words(self) -> str:
        """Return what it died of, in words."""
        return self.error or processes.describe(self.returncode)


@dataclass(frozen=True)
class Cause:
    """An error of the script; the same error at the same place is equal.

    Attributes:
        returncode: the exit code.
        error: the error, in `brief`.
        point: how far the training had come, as in `hvdrecover.heartbeat.Reading.point`.
    """

    returncode: int
    error: str
    point: tuple[int, int]

    @classmethod
    def of(cls, fault: Mapping[str, Any]) -> Cause:
        """The one that a guardian has reported, as a fault."""
        changed, steps = fault["point"]
        return cls(int(fault["exit"]), brief(str(fault["detail"])), (int(changed), int(steps)))


def brief(text: str) -> str:
    """Return a text that is short, and another one for another text; the same if it is that already."""
    if len(text) <= _BRIEF:
        return text
    digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=16)
    return f"{text[: _BRIEF // 2]}… {digest.hexdigest()}"


def end(death: Death, *, first: bool = False) -> End:
    """Return how a process has ended.

    Args:
        death: its end.
        first: whether the job has not made any commit yet.
    """
    phase = death.reading.phase
    if death.returncode == 0 and phase in (Phase.FINISHED, Phase.UNKNOWN):
        name = "finished"
    elif death.returncode == 0 and phase == Phase.STARTING and first:
        name = "untrained"
    elif phase == Phase.REMOVED:
        name = "removed"
    elif phase == Phase.LEFT or (death.returncode == PREEMPTED and death.reading.stop):
        name = "left"
    elif death.returncode == -signal.SIGTERM:  # which Horovod sends to what it no longer needs
        name = "dismissed"
    elif death.hung and phase in (Phase.STARTING, Phase.RECOVERING):
        name = "apart"  # ranks wait for each other there, so nobody knows who is to blame
    elif (name := fault(death)) == "script_error":
        return ends.of_error(death.kinds, first=first)
    known = ends.named(name)
    assert known is not None
    return known


def fault(death: Death) -> Fault:
    """Return what kind of fault a lost process died of."""
    if death.hung:
        return "hang"
    if death.returncode == 0:
        return "early_exit"
    if death.returncode == -signal.SIGKILL and death.out_of_memory:
        return "out_of_memory"
    final = ends.of_error(death.kinds, first=False).repair == "end"  # its text may quote Horovod's
    of_others = not final and any(text in death.error for text in _OF_OTHERS)
    return "script_error" if death.returncode > 0 and not of_others else "crash"


def given_up(death: Death, ending: End, deaths: int, seen: Collection[Cause]) -> str:
    """Return why a process is not restarted in place that could be; an empty string if it is.

    Args:
        death: this death.
        ending: how the process has ended.
        deaths: deaths in a row without progress, this one included.
        seen: the errors of the script that were seen before.
    """
    if death.reading.phase == Phase.FINISHED:
        return "the other ranks have finished, and there is no rendezvous any more"
    if ending.name == "script_error" and death.cause in seen:
        return SAME_ERROR
    if deaths >= BUDGET:
        return f"{deaths} deaths in a row without progress"
    return ""


def pause(deaths: int) -> float:
    """Return for how many seconds to wait before a process is restarted in place.

    Args:
        deaths: deaths in a row without progress.
    """
    return min(_LONGEST_PAUSE, 2.0 ** (deaths - 2)) if deaths > 1 else 0.0
