"""The deaths of training processes, and the decisions after them."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdrecover.config import PREEMPTED
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import ends, processes
from hvdrecover.launch.ends import End

Fault = Literal[
    "crash", "hang", "out_of_memory", "preemption", "lost_host", "launcher_lost", "script_error", "early_exit"
]
OF_HOSTS = ("crash", "hang", "out_of_memory")  # possibly because of the host, so they may happen again there
# Errors because of other ranks' faults, wherever the script catches them.
_OF_OTHERS = ("Horovod initialization failed", "HorovodInternalError", "HostsUpdatedInterrupt")
# Horovod rejects the script's request. No rank is lost: the ranks have compared their requests.
_OBJECTION = re.compile(
    r"HorovodInternalError: (Mismatched |No \w+ operation enabled|Requested to |Process-set rank zero "
    r"tried to |\w+ is not supported with Join|Reducescatter with prescale_factor)"
)
SAME_ERROR = "the script has failed in the same way at the same place again"
BUDGET = 3  # deaths in a row without progress
_BRIEF = 200  # characters
_LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class Death:
    """The end of a training process."""

    returncode: int  # as `subprocess` has it: negative for a signal
    reading: Reading  # the last state of its page
    hung: bool = False  # whether its guardian killed it because it was hanging
    out_of_memory: bool = False  # whether the kernel killed processes for lack of memory meanwhile
    error: str = ""  # the error that ended it, or an empty string
    # the error's class and its line in the script, which stay the same where its text varies
    identity: str = ""
    kinds: tuple[str, ...] = ()  # `hvdrecover.error_kinds.kinds` of the error

    @property
    def cause(self) -> Cause:
        """Return the error of the script and its progress."""
        return Cause(self.returncode, (self.identity or self.words)[-_BRIEF:], self.reading.point)

    @property
    def words(self) -> str:
        """Return the error, or the exit code or signal in words."""
        return self.error or processes.describe(self.returncode)


@dataclass(frozen=True)
class Cause:
    """An error of the script; the same error at the same place is equal."""

    returncode: int  # the exit code
    error: str  # `Death.identity`, else the exit code in words
    point: tuple[int, int]  # how far the training had come, as in `hvdrecover.heartbeat.Reading.point`

    @classmethod
    def of(cls, fault: Mapping[str, Any]) -> Cause:
        """Return the cause in a guardian's report of a fault."""
        changed, steps = fault["point"]
        error = str(fault.get("identity") or fault["detail"])[-_BRIEF:]
        return cls(int(fault["exit"]), error, (int(changed), int(steps)))


def brief(text: str) -> str:
    """Return a text in one line of bounded length, for messages whose error is printed elsewhere."""
    line = " ".join(text.split())
    return line if len(line) <= _BRIEF else f"{line[:_BRIEF]}…"


def end(death: Death, *, first: bool = False) -> End:
    """Return how a process has ended; `first` says whether the job is still without a commit."""
    phase = death.reading.phase
    if death.returncode == 0 and phase == Phase.FINISHED:
        name = "finished"
    elif death.returncode == 0 and first and not death.error and phase in (Phase.UNKNOWN, Phase.STARTING):
        name = "untrained"
    elif phase == Phase.REMOVED:
        name = "removed"
    elif phase == Phase.LEFT or (death.returncode == PREEMPTED and death.reading.stop):
        name = "left"
    elif death.returncode == -signal.SIGTERM:  # Horovod sends it to workers that it no longer needs
        name = "dismissed"
    elif death.hung and phase in (Phase.STARTING, Phase.RECOVERING):
        name = "apart"  # ranks wait for each other there, so the culprit is unknown
    elif (name := fault(death)) == "script_error":
        return ends.of_error(death.kinds, first=first)
    known = ends.named(name)
    assert known is not None
    return known


def fault(death: Death) -> Fault:
    """Return what kind of fault a lost process died of."""
    if death.hung:
        return "hang"
    if death.returncode == 0 and not death.error:  # after an error, 0 is a wrapper's: `python … | tee`
        return "early_exit"
    if death.returncode == -signal.SIGKILL and death.out_of_memory:
        return "out_of_memory"
    # The text of an error of ours may quote Horovod's.
    own = ends.of_error(death.kinds, first=False).repair == "end" or _OBJECTION.search(death.error)
    of_others = not own and any(text in death.error for text in _OF_OTHERS)
    return "script_error" if death.returncode >= 0 and not of_others else "crash"


def given_up(death: Death, ending: End, deaths: int, seen: Collection[Cause]) -> str:
    """Return the reason not to restart a process in place, or '' if it is restarted."""
    if death.reading.phase == Phase.FINISHED:
        return "the other ranks have finished, and there is no rendezvous any more"
    if ending.name == "script_error" and death.cause in seen:
        return SAME_ERROR
    if deaths >= BUDGET:
        return f"{deaths} deaths in a row without progress"
    return ""


def pause(deaths: int) -> float:
    """Return the seconds to wait before a restart in place."""
    return min(_LONGEST_PAUSE, 2.0 ** (deaths - 2)) if deaths > 1 else 0.0


@dataclass
class Record:
    """The record of one slot."""

    # deaths in a row without progress, which is what goes beyond the farthest point reached before
    deaths: int = 0
    # the farthest point that is known of, as in `hvdrecover.heartbeat.Reading.point`
    farthest: tuple[int, int] = (0, 0)
    # the errors of the script that were seen, here or in an earlier start of the job
    causes: set[Cause] = field(default_factory=set)
    committed: bool = False  # whether the job has made any commit
    joined: bool = False  # whether any training process of the job is known to have imported hvdrecover
    # whether a training process of this slot, or of an earlier start, was in a training function
    trained: bool = False
    root: str = ""  # the checkpoint root in use, which the job has claimed; empty if there was none
    _reached: tuple[int, int] = (0, 0)  # the farthest point at the last death

    def note(self, reading: Reading) -> None:
        """Note how far the training has come."""
        self.farthest = max(self.farthest, reading.point)
        self.committed = self.committed or reading.commit > 0
        before = (Phase.UNKNOWN, Phase.READY, Phase.STARTING)
        self.trained = self.trained or self.committed or reading.phase not in before
        self.joined = self.joined or self.committed or reading.phase != Phase.UNKNOWN

    def note_root(self, notes: dict[str, Any]) -> None:
        """Note which checkpoint root a training process has agreed on with the others."""
        self.root = str(notes.get("root", self.root))

    @property
    def handed_down(self) -> dict[str, str]:
        """Environment variables for the next training process."""
        untrained = {"HVDRECOVER_UNTRAINED": "1"} if self.deaths and not self.trained else {}
        return untrained | ({"HVDRECOVER_CLAIMED": self.root} if self.root and self.committed else {})

    def learn(self, known: dict[str, Any]) -> None:
        """Add the supervisor's facts about the job."""
        self.committed = self.committed or bool(known["committed"])
        self.root = self.root or str(known["root"])
        self.causes |= {Cause.of(each) for each in known["causes"]}

    def died(self, death: Death, end: End) -> str:
        """Record a death that can be repaired in place; return the reason not to, or ''."""
        if self.farthest > self._reached:
            self.deaths = 0
        self.deaths, self._reached = self.deaths + 1, self.farthest
        reason = given_up(death, end, self.deaths, self.causes)
        if end.name == "script_error":
            self.causes.add(death.cause)
        return reason
