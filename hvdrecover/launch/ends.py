"""How processes end: the table of ends with the reaction to each, and the decisions after a death.

A guardian builds a `Death`, finds its `End` in the table, and asks its `Record` whether the process may be
restarted in place. ``docs/launching.md`` has the table for people.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdrecover.config import FENCED, PREEMPTED
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import processes

Repair = Literal["none", "in place", "job", "end"]
"""Nothing is left to do, restart the process in place, start the whole job again, or end the job."""


@dataclass(frozen=True)
class End:
    name: str  # for events and messages between our processes
    how: str  # how the process has ended; for people
    repair: Repair  # the first action
    # the job's exit code if it ends by this; None for the script's own, or if others decide
    code: int | None = None
    errors: tuple[str, ...] = ()  # names of the exceptions of ours by which it is recognised


def _end(name: str, how: str, repair: Repair, code: int | None, errors: str = "") -> End:
    return End(name, how, repair, code, tuple(errors.split()))


ENDS = (
    _end("finished", "the training function has returned", "none", 0),
    _end(
        "untrained",
        "exit code 0, though no training function was called and nothing was committed",
        "none",
        0,
    ),
    _end("left", "it left after a preemption", "none", PREEMPTED),
    _end("removed", "its host no longer belongs to the job", "none", None),
    _end("dismissed", "Horovod ended it by SIGTERM", "none", None),
    _end("crash", "a signal, or an error of Horovod because a rank was lost", "in place", 1),
    _end("hang", "no progress for the hang timeout", "in place", 1),
    _end("out_of_memory", "the kernel killed it for lack of memory", "in place", 1),
    _end("early_exit", "exit code 0 before the training function has returned", "in place", 1),
    _end("storage", "the storage is away where the job can't do without it", "in place", 1, "StorageError"),
    _end("rendezvous", "ranks were lost during a rendezvous", "in place", 1, "RecoveryError"),
    _end(
        "overtaken",
        "a later generation of its own job claimed the checkpoint root",
        "in place",
        1,
        "OvertakenError",
    ),
    _end("script_error", "any other exception", "in place", None),
    _end("first_error", "an exception before the job's first commit", "end", None),
    _end("apart", "it waited for the other ranks for the startup timeout", "job", 1),
    _end(
        "early_collective",
        "it joined the running job, and called a collective before the training function",
        "job",
        1,
        "EarlyCollectiveError",
    ),
    _end("fenced", "another job has claimed the checkpoint root", "end", FENCED, "FencedError"),
    _end(
        "too_old",
        "a due commit has waited longer than `HVDRECOVER_MAX_DURABLE_AGE`",
        "end",
        None,
        "DurableAgeError",
    ),
    _end(
        "no_progress",
        "the ranks rolled back 3 times in a row without a lost process, and without progress",
        "end",
        None,
        "NoProgressError",
    ),
    _end(
        "unusable",
        "the checkpoint root is not ours, too new, does not fit, was emptied while near commits are left, or "
        "has only broken commits, or its server's host key is unknown",
        "end",
        None,
        "EmptiedRootError ForeignRootError FormatVersionError HostKeyError MismatchError NoUsableCommitError",
    ),
    _end(
        "wrong",
        "a setting, the state, the structure or the data are not what they must be",
        "end",
        None,
        "ConfigError StateError StructureError DataChangedError",
    ),
)
BY_NAME = {end.name: end for end in ENDS}
# Errors of a storage that waiting does not repair, if the job has never made a commit there.
_REFUSALS = {
    *("AuthenticationException", "FileNotFoundError", "NoCredentialsError"),
    *("NotADirectoryError", "PermissionError"),
}
FIRST_ERROR = BY_NAME["first_error"]
_BY_ERROR = {error: end for end in ENDS for error in end.errors}


def of_error(kinds: Sequence[str], *, first: bool) -> End:
    """Return the end that an exception of these kinds means; `first`: the job is still without a commit."""
    if first and not _REFUSALS.isdisjoint(kinds):
        return FIRST_ERROR
    known = next((_BY_ERROR[kind] for kind in kinds if kind in _BY_ERROR), None)
    return known or (FIRST_ERROR if first else BY_NAME["script_error"])


# -- deaths of training processes ----------------------------------------------------------------------

Fault = Literal[
    "crash", "hang", "out_of_memory", "preemption", "lost_host", "launcher_lost", "script_error", "early_exit"
]
OF_HOSTS = ("crash", "hang", "out_of_memory")  # the host may be the cause, so they may happen there again
# Errors because of other ranks' faults, wherever the script catches them.
_OF_OTHERS = (
    "Horovod has been shut down",
    "Horovod initialization failed",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
)
# Horovod rejects the script's request. No rank is lost: the ranks have compared their requests.
_OBJECTION = re.compile(
    r"HorovodInternalError: (Mismatched |No \w+ operation enabled|Requested to |Process-set rank zero "
    r"tried to |\w+ is not supported with Join|Reducescatter with prescale_factor)"
)
BUDGET = 3  # deaths in a row without progress
_UNTRAINED = (Phase.UNKNOWN, Phase.STARTING, Phase.PLAIN)
_LONGEST_PAUSE = 60.0  # seconds


@dataclass(frozen=True)
class Death:
    returncode: int  # as `subprocess` has it: negative for a signal
    reading: Reading  # the last state of its page
    notes: Mapping[str, Any] = field(default_factory=dict)  # its notes, as of `hvdrecover.uncaught`
    hung: bool = False  # whether its guardian killed it because it was hanging
    out_of_memory: bool = False  # whether the kernel killed processes for lack of memory meanwhile
    lost: str = ""  # Horovod's error outside `run`, even if the script caught it; or empty

    @property
    def _of_error(self) -> Mapping[str, Any]:
        # After a signal, the error that the process noted before has not ended it.
        return self.notes if self.returncode >= 0 else {}

    @property
    def error(self) -> str:
        return str(self._of_error.get("error", ""))

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self._of_error.get("kinds", ()))

    @property
    def words(self) -> str:
        """Return the error, or the exit code or signal in words."""
        return self.error or processes.describe(self.returncode)

    @property
    def identity(self) -> str:
        """Return the error's class and its line in the script, which stay the same where its text varies."""
        return str(self._of_error.get("identity") or self.words)


def end(death: Death, *, first: bool = False) -> End:
    """Return how a process has ended; `first` says whether the job is still without a commit."""
    phase, returncode = death.reading.phase, death.returncode
    if returncode == 0 and phase == Phase.FINISHED:
        return BY_NAME["finished"]
    if returncode == 0 and first and not death.error and phase in _UNTRAINED:
        return BY_NAME["untrained"]
    if phase == Phase.REMOVED:
        return BY_NAME["removed"]
    if phase == Phase.LEFT or (returncode == PREEMPTED and death.reading.stop):
        return BY_NAME["left"]
    if returncode == -signal.SIGTERM:  # Horovod sends it to workers that it no longer needs
        return BY_NAME["dismissed"]
    if death.hung and phase in (Phase.STARTING, Phase.RECOVERING):
        return BY_NAME["apart"]  # ranks wait for each other there, so the culprit is unknown
    kind = fault(death)
    return of_error(death.kinds, first=first) if kind == "script_error" else BY_NAME[kind]


def fault(death: Death) -> Fault:
    """Return the kind of fault that ended a process."""
    if death.hung:
        return "hang"
    if death.returncode == 0 and not death.error:  # after an error, 0 comes from a wrapper: `python … | tee`
        return "early_exit"
    if death.returncode == -signal.SIGKILL and death.out_of_memory:
        return "out_of_memory"
    # The text of an error of ours may quote Horovod's.
    text = death.lost or death.error
    own = of_error(death.kinds, first=False).repair == "end" or _OBJECTION.search(text)
    of_others = not own and any(each in text for each in _OF_OTHERS)
    return "script_error" if death.returncode >= 0 and not of_others else "crash"


def pause(deaths: int) -> float:
    return min(_LONGEST_PAUSE, 2.0 ** (deaths - 2)) if deaths > 1 else 0.0


@dataclass
class Record:
    """The facts about a slot and the job on which its guardian decides."""

    deaths: int = 0  # in a row, without progress beyond the farthest point reached before
    farthest: tuple[int, int] = (0, 0)  # the farthest known `hvdrecover.heartbeat.Reading.point`
    committed: bool = False  # whether the job has made any commit
    joined: bool = False  # whether any training process of the job is known to have imported hvdrecover
    in_run: bool = False  # whether a process of this start of the job was in a function decorated by `run`
    rounds: int = 0  # how often all ranks of the job were started again together
    root: str = ""  # the checkpoint root in use, which the job has claimed; empty if there was none
    _reached: tuple[int, int] = (0, 0)  # the farthest point at the last death

    def note(self, reading: Reading) -> None:
        self.farthest = max(self.farthest, reading.point)
        self.committed |= reading.commit > 0
        self.in_run |= reading.in_run
        self.joined |= self.committed or reading.phase != Phase.UNKNOWN

    @property
    def handed_down(self) -> dict[str, str]:
        """Environment variables for the next training process."""
        again = (self.deaths or self.rounds) and not self.in_run
        untrained = {"HVDRECOVER_UNTRAINED": "1"} if again else {}
        return untrained | ({"HVDRECOVER_CLAIMED": self.root} if self.root and self.committed else {})

    def learn(self, known: Mapping[str, Any]) -> None:
        """Add the supervisor's facts about the job (`hvdrecover.launch.restarts.known`)."""
        self.committed |= known["committed"]
        self.in_run |= known["in_run"]
        self.root = self.root or known["root"]

    def died(self, death: Death) -> str:
        """Record a death that can be repaired in place; return the reason not to restart, or ''."""
        if self.farthest > self._reached:
            self.deaths = 0
        self.deaths, self._reached = self.deaths + 1, self.farthest
        if death.reading.phase == Phase.FINISHED:
            return "the other ranks have finished, and there is no rendezvous any more"
        return f"{self.deaths} deaths in a row without progress" if self.deaths >= BUDGET else ""
