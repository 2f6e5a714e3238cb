"""How processes end, and the decisions that follow; pure functions.

A guardian builds a `Death`, finds its `End`, and asks its `Record` whether to restart the process in place.
The supervisor decides about the job: `together` during an `Attempt` (one start of it), `outcome` after it.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from hvdrecover.checkpoint import CommitId
from hvdrecover.config import FENCED, PREEMPTED
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import processes, waits

Repair = Literal["none", "in place", "job", "end"]
"""Nothing is left to do, restart the process in place, start the whole job again, or end the job."""


@dataclass(frozen=True)
class End:
    name: str  # for events and messages between our processes
    how: str  # how the process has ended; for people
    repair: Repair  # the first action
    code: int | None = None  # the job's exit code; None for the script's own, or if others decide
    errors: tuple[str, ...] = ()  # names of the exceptions of ours by which it is recognised


# docs/launching.md has this table for people.
ENDS = (
    End("finished", "the training function has returned", "none", 0),
    End(
        "untrained",
        "exit code 0, though no training function was called and nothing was committed",
        "none",
        0,
    ),
    End("left", "it left after a preemption", "none", PREEMPTED),
    End("removed", "its host no longer belongs to the job", "none"),
    End("dismissed", "Horovod ended it by SIGTERM", "none"),
    End("crash", "a signal, or an error of Horovod because a rank was lost", "in place", 1),
    End("hang", "no progress for the hang timeout", "in place", 1),
    End("out_of_memory", "the kernel killed it for lack of memory", "in place", 1),
    End("early_exit", "exit code 0 before the training function has returned", "in place", 1),
    End("storage", "the storage is away where the job can't do without it", "in place", 1, ("StorageError",)),
    End("rendezvous", "ranks were lost during a rendezvous", "in place", 1, ("RecoveryError",)),
    End(
        "overtaken",
        "a later generation of its own job claimed the checkpoint root",
        "in place",
        1,
        ("OvertakenError",),
    ),
    End("script_error", "any other exception", "in place"),
    End("first_error", "an exception before the job's first commit", "end"),
    End("apart", "it waited for the other ranks for the startup timeout", "job", 1),
    End(
        "early_collective",
        "it joined the running job, and called a collective before the training function",
        "job",
        1,
        ("EarlyCollectiveError",),
    ),
    End("fenced", "another job has claimed the checkpoint root", "end", FENCED, ("FencedError",)),
    End(
        "too_old",
        "a due commit has waited longer than `HVDRECOVER_MAX_DURABLE_AGE`",
        "end",
        errors=("DurableAgeError",),
    ),
    End(
        "no_progress",
        "the ranks rolled back 3 times in a row without a lost process, and without progress",
        "end",
        errors=("NoProgressError",),
    ),
    End(
        "unusable",
        "the checkpoint root is not ours, too new, does not fit, was emptied while near commits are left, or "
        "has only broken commits, or its server's host key is unknown",
        "end",
        errors=(
            *("EmptiedRootError", "ForeignRootError", "FormatVersionError", "HostKeyError"),
            *("MismatchError", "NoUsableCommitError"),
        ),
    ),
    End(
        "wrong",
        "a setting, the state, the structure or the data are not what they must be",
        "end",
        errors=("ConfigError", "StateError", "StructureError", "DataChangedError"),
    ),
)
BY_NAME = {end.name: end for end in ENDS}
# Errors of a storage that waiting does not repair, if the job has never made a commit there.
_REFUSALS = {"AuthenticationException", "NoCredentialsError", "PermissionError"}
_REFUSALS |= {"FileNotFoundError", "NotADirectoryError"}
FIRST_ERROR = BY_NAME["first_error"]
_BY_ERROR = {error: end for end in ENDS for error in end.errors}


def of_error(kinds: Sequence[str], *, first: bool) -> End:
    """Return the end that an exception of these kinds means; `first`: the job is still without a commit."""
    if first and not _REFUSALS.isdisjoint(kinds):
        return FIRST_ERROR
    known = next((_BY_ERROR[kind] for kind in kinds if kind in _BY_ERROR), None)
    return known or (FIRST_ERROR if first else BY_NAME["script_error"])


# -- deaths of training processes ----------------------------------------------------------------------

OF_HOSTS = ("crash", "hang", "out_of_memory")  # the host may be the cause, so they may happen there again
# In errors because of other ranks' faults, wherever the script catches them.
_OF_OTHERS = re.compile(
    "Horovod has been shut down|Horovod initialization failed|HorovodInternalError|HostsUpdatedInterrupt"
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
    notes: Mapping[str, Any] = field(default_factory=dict)  # the facts that it sent by `heartbeat.notify`
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
        return self.error or processes.describe(self.returncode)

    @property
    def identity(self) -> str:
        """Return the error's class and its line in the script, which stay the same where its text varies."""
        return str(self._of_error.get("identity") or self.words)


def end_of(death: Death, *, first: bool = False) -> End:
    """Return how a process has ended; `first`: the job is still without a commit."""
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
    kind = fault_of(death)
    return of_error(death.kinds, first=first) if kind == "script_error" else BY_NAME[kind]


def fault_of(death: Death) -> str:
    if death.hung:
        return "hang"
    if death.returncode == 0 and not death.error:  # after an error, 0 comes from a wrapper: `python … | tee`
        return "early_exit"
    if death.returncode == -signal.SIGKILL and death.out_of_memory:
        return "out_of_memory"
    # The text of an error of ours may quote Horovod's.
    text = death.lost or death.error
    own = of_error(death.kinds, first=False).repair == "end" or _OBJECTION.search(text)
    of_others = not own and _OF_OTHERS.search(text)
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
        """Add the supervisor's facts about the job (`known`)."""
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


# -- decisions about the whole job --------------------------------------------------------------------

FIRST_MINUTE = 60.0  # seconds after the imports in which an error of a script counts as its bug
REFUSED = 2  # exit code of our horovodrun if Horovod was built without Gloo or MPI, and the job needs it
CALM = 3600.0  # seconds without a fault after which the count of restarts begins again

# Signals that a process causes itself; others come from outside.
_OWN_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}
_FOR_GOOD = {"fenced", "too_old"}  # ends that another start must not undo

_NO_COMMIT = (
    "the command has ended without a commit of hvdrecover's: after a fault, all its ranks would have started "
    "again from its own checkpoints. With a state, it would resume from its last commit (docs/torch.md)"
)
_NOT_FINISHED = (
    "the command has ended, and has not called state.finish(), so the run is not marked finished: a later "
    "start resumes from its last commit"
)
_FRESH_START = (
    "This error came after a recovery in place, and a fresh start may avoid it: all processes start once more"
)
SAME_ERROR = "the script has failed in the same way at the same place again"

Fault = dict[str, Any]
"""A guardian's report of a fault."""

Cause = tuple[int, str, int, int]
"""The exit code, error and place (`hvdrecover.heartbeat.Reading.point`) of an error; equal if it repeats."""


def cause(fault: Fault) -> Cause:
    changed, steps = fault["point"]
    return fault["exit"], str(fault.get("identity") or fault["detail"]), changed, steps


@dataclass
class Attempt:
    number: int  # counted from 1
    code: int = 0  # how the launcher has ended; negative for a signal
    # how slots report their ends: finished, untrained, preempted (with the job), left (with a host), stopped
    ends: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)  # the faults that guardians reported
    point: tuple[int, int] = (0, 0)  # the farthest `Reading.point` that was reported
    committed: bool = False  # whether a commit was reported
    root: str = ""  # the checkpoint root that it has claimed and made a commit for, if one was reported
    in_run: bool = False  # whether a process was in a function decorated by `run`
    exits: list[Fault] = field(default_factory=list)  # processes outside `run` that ended with exit code 0
    rounds: int = 0  # how often all ranks have started again together, in place
    guardians: int = 0  # how many guardians it had until then
    over: bool = False  # whether it ends because its ranks cannot start again together in place

    @property
    def errors(self) -> list[Fault]:
        """The errors of the script, without those that follow another rank's."""
        return [each for each in self.faults if each.get("fault") == "script_error" and not each.get("heard")]


@dataclass(frozen=True)
class Outcome:
    action: Literal["end", "restart"]
    code: int  # the exit code, if the job ends
    reason: str  # why, in words
    pause: float = 0.0  # seconds until it is started again
    without_progress: int = 0  # restarts in a row without progress, the one to come included
    suspect: str | None = None  # durable commits that the next start skips, as ``FIRST..LAST``
    traceback: str = ""  # of the error that ends the job or this start
    message: str = ""  # for people, before the traceback; by default the reason


@dataclass(frozen=True)
class Streak:
    """Restarts of the job in a row: new starts, and restarts of all ranks together in place."""

    restarts: int = 0
    error: Cause | None = None  # the script's error in the last fault
    commits: int = 0  # commits of the whole run before the last fault, at which the state had changed
    time: float = 0.0  # of the last fault, by the monotonic clock

    def before(self, attempt: Attempt, now: float) -> Streak:
        """Return the streak at a fault that happens now: progress or a calm hour has ended it."""
        commits = attempt.point[0]
        calm = commits > self.commits or now - self.time > CALM
        return Streak(0, None, commits) if calm else self


@dataclass(frozen=True)
class Together:
    """The decision after a fault outside `run`, where no rank can continue without the others."""

    action: Literal["wait", "restart", "over", "end"]  # `over`: start the job again, or give up
    fault: Fault
    error: Cause | None = None  # the script's, if that is the fault


def together(
    attempt: Attempt, streak: Streak, *, guardians: int, begun: bool, now: float, max_restarts: int
) -> Together | None:
    """Decide what follows the faults of processes outside `run`; None without a fault."""
    faults = [each for each in attempt.faults if each.get("round", attempt.rounds) == attempt.rounds]
    # A process may die outside `run` while another one enters it, before its guardian knows that.
    # The guardian then waits like the others, so the whole job starts again.
    if attempt.in_run:  # guardians repair the faults without a round by themselves
        faults = [each for each in faults if each.get("round") is not None]
    if not faults:
        return None
    exits = [each for each in attempt.exits if each["round"] == attempt.rounds]
    fault = next((each for each in faults if not _is_of_others(each)), None)
    if fault is None:
        # All failed because of another rank. Wait a moment for its report; if it hangs, there may be none.
        if len(faults) + len(exits) < guardians and now - faults[0]["time"] < waits.CULPRIT:
            return Together("wait", faults[0])
        fault = (exits or faults)[0]
    error = None
    if fault.get("end") in ("script_error", FIRST_ERROR.name) or fault in exits:
        error = cause(fault)
        error = error if error[2] else (*error[:2], 0, 0)  # without commits, its place is not known
    early = attempt.number == 1 and not attempt.rounds and not attempt.committed
    # An error of the script in its first minute ends the job, and so does the same error twice in a row.
    if error and (error == streak.error or (early and fault["age"] < FIRST_MINUTE)):
        return Together("end", fault, error)
    # In place only if all guardians are there, and can rejoin Horovod's driver.
    # `begun`: a process of each guardian has imported hvdrecover.
    intact = begun and not attempt.in_run and guardians == attempt.guardians
    intact = intact and fault["fault"] not in ("lost_host", "launcher_lost")
    may = intact and streak.restarts < max_restarts
    return Together("restart" if may else "over", fault, error)


def ending(attempts: Sequence[Attempt]) -> Fault | None:
    """Return the fault that ends the last attempt at once, or None."""
    # What follows faults outside `run` is decided by `together`, which marks those that end the job.
    decided = [each for each in attempts[-1].faults if each.get("final") or each.get("round") is None]
    found = [each for each in decided if _is_ending(each, attempts)]
    # A rank's own error is preferred to another rank's report of it.
    return min(found, key=lambda fault: bool(fault.get("heard")), default=None)


def outcome(
    attempts: Sequence[Attempt], without_progress: int, *, ranks: int, stopping: bool, max_restarts: int
) -> Outcome:
    """Decide whether the job ends or starts again after the last attempt."""
    last = attempts[-1]
    if (over := _over(attempts, ranks, stopping=stopping)) is not None:
        return over
    farthest = max((each.point for each in attempts[:-1]), default=(-1, 0))
    used = 0 if last.point > farthest and not last.over else without_progress
    suspect, fault = suspected(attempts), ending(attempts)
    why, traceback = reason(last), ""
    end = BY_NAME.get(fault.get("end", "")) if fault else None
    if fault and end and (end.repair == "end" or (end.repair == "in place" and not suspect)):
        if used >= max_restarts or end.name in _FOR_GOOD or not _may_need_no_repair(fault, attempts):
            return _ended(fault, end)
        why = f"{fault['message']}. {_FRESH_START}"
        traceback = fault.get("traceback", "") if end.repair == "end" else ""
    if used >= max_restarts:
        return Outcome("end", 1, f"{used} restarts in a row have brought no progress")
    return Outcome("restart", 1, why, pause(used + 2), used + 1, suspect, traceback)


def _over(attempts: Sequence[Attempt], ranks: int, *, stopping: bool) -> Outcome | None:
    """Return the outcome of a job that has done its work or has left; None for another."""
    last = attempts[-1]
    # The ranks have confirmed to each other that training is finished. If all slots ended like this, the
    # launcher's exit code does not count: it may have failed only because its terminal is gone.
    finished, all_ranks = last.ends.count("finished"), min(ranks, last.guardians or ranks)
    if finished and (last.code == 0 or finished == len(last.ends) >= all_ranks):
        return Outcome("end", 0, "the training is finished")
    if stopping or "preempted" in last.ends:
        return Outcome("end", PREEMPTED, "stopped after a preemption; start it again to continue")
    if last.code == REFUSED and not last.guardians:
        return Outcome("end", REFUSED, "horovodrun refuses the job")
    committed = any(attempt.committed for attempt in attempts)
    if last.code != 0 or (committed and any(attempt.in_run for attempt in attempts)):
        return None
    if not last.ends and not committed:
        return Outcome("end", 0, "the command has ended")
    if set(last.ends) == {"untrained"} and (not last.faults or len(last.ends) >= all_ranks):
        return Outcome("end", 0, "the command has ended", message=_NOT_FINISHED if committed else _NO_COMMIT)
    return None


def _ended(fault: Fault, end: End) -> Outcome:
    code = end.code or int(fault["exit"]) or 1
    traceback = "" if end.code is not None else fault.get("traceback", "")
    # If one end stands for several errors, its description is too vague as a heading.
    how = "the job ends with this error" if len(end.errors) > 1 else end.how
    why = f"{end.how}: {fault['detail']}"
    if end.repair != "end":
        how = why = SAME_ERROR
    heading = f"{fault['name']}: {how}:" if traceback else ""
    return Outcome("end", code, why, traceback=traceback, message=heading)


def known(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the facts about earlier starts that the processes of the next one need."""
    return {
        "committed": any(attempt.committed for attempt in attempts),
        "in_run": attempts[-1].in_run if attempts else False,
        "root": next((each.root for each in reversed(attempts) if each.root), ""),
    }


def suspected(attempts: Sequence[Attempt]) -> str | None:
    """Return the durable commits that the next attempt skips, as ``FIRST..LAST``, or None."""
    faults = attempts[-1].faults
    last = next((fault for fault in reversed(faults) if fault.get("loaded")), None)
    # Kills, lack of memory, hangs and unreachable storage say nothing about a commit.
    if last is None or not _is_own(last) or (last is not faults[-1] and ending(attempts) is None):
        return None
    own = (each for attempt in attempts for each in attempt.faults if each.get("loaded") and _is_own(each))
    # A commit is suspect if the job failed twice from it in the same way at the same place.
    # Of the same slot: one fault may kill the processes of several slots.
    alike = [each for each in own if each["at"] == last["at"] and cause(each) == cause(last)]
    # After an error of the script, one failure from the commit suffices: the first may precede the commit.
    again = last["end"] == "script_error" and _is_ending(last, attempts)
    loaded = [commit for each in alike if (commit := CommitId.parse(each["loaded"])) is not None]
    if not loaded or (len(alike) < 2 and not again):
        return None
    # Later commits without progress are suspect, too. Not by name: g10000 sorts before g9999.
    return f"{min(loaded).name}..{max(CommitId(*each['commit']) for each in alike).name}"


def reason(attempt: Attempt) -> str:
    message = attempt.faults[-1]["message"] if attempt.faults else ""
    if any(fault.get("end") == "apart" for fault in attempt.faults):
        return f"the ranks have not come together; {message}"
    if attempt.code < 0:
        return f"the launcher was killed by signal {-attempt.code}"
    if attempt.over:
        return str(message)
    if attempt.faults:
        return f"Horovod gave up; the last fault: {message}"
    return f"the launcher ended with exit code {attempt.code}"


def _is_own(fault: Fault) -> bool:
    """Return whether a process caused its own end."""
    return fault["end"] == "script_error" or (fault["fault"] == "crash" and fault["exit"] in _OWN_SIGNALS)


def _came_earlier(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    return cause(fault) in {cause(each) for attempt in attempts[:-1] for each in attempt.errors}


def _may_need_no_repair(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    """Return whether an error came only after a recovery in place, so that a fresh start may avoid it."""
    new = fault.get("round") is not None  # all processes were
    if new or _came_earlier(fault, attempts):
        return False
    before = takewhile(
        lambda each: each["fault"] != "script_error" or cause(each) != cause(fault), attempts[-1].faults
    )
    # A surviving process still has objects outside the state, such as a half-full list.
    return any(not each.get("final") and not _is_of_others(each) for each in before)


def _is_of_others(fault: Fault) -> bool:
    """Return whether a process has ended because of another process's fault, which is reported separately."""
    of_horovod = fault["fault"] == "crash" and fault.get("exit", 0) > 0
    return bool(fault.get("heard")) or fault.get("end") == "rendezvous" or of_horovod


def _is_ending(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    if (name := fault.get("end", "")) != "script_error":
        return name in BY_NAME and BY_NAME[name].repair in ("job", "end")
    if fault.get("again") or _came_earlier(fault, attempts):
        return True
    before = takewhile(lambda each: each is not fault, attempts[-1].errors)
    return any(each["at"] == fault["at"] and cause(each) == cause(fault) for each in before)
