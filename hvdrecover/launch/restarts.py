"""The decision after an attempt (one start of the whole job); pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdrecover.checkpoint import CommitId
from hvdrecover.config import PREEMPTED
from hvdrecover.launch import ends, waits
from hvdrecover.launch.ends import BY_NAME, FIRST_ERROR, End

FIRST_MINUTE = 60.0  # seconds after the imports in which an error of a script counts as its bug
REFUSED = 2  # exit code of our horovodrun if Horovod was built without what the job needs
CALM = 3600.0  # seconds without a fault after which the count of restarts begins again

# Signals that a process causes itself; others come from outside.
_OWN_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}

_UNTRAINED = (
    "the command has ended without a commit of hvdrecover's: after a fault, all its ranks would have started "
    "again from its own checkpoints. With a state, it would resume from its last commit (docs/torch.md)"
)
_UNFINISHED = (
    "the command has ended, and has not called state.finish(), so the run is not marked finished: a later "
    "start resumes from its last commit"
)
_ANEW = (
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
    # how slots have ended, by their own account: finished, untrained, preempted (with the whole job), left
    # (with their host) or stopped
    ends: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)  # the faults that guardians reported
    # the farthest point that was reported, as in `hvdrecover.heartbeat.Reading.point`
    point: tuple[int, int] = (0, 0)
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
    """Decide what follows the faults of processes outside `run`; None without a fault.

    1. Find the cause among the reports of this round. The other ranks end because of it: Horovod fails
       there. A process that hangs, or is cut off, may report nothing: wait a moment for others.
    2. An error of the script in its first minute ends the job, and so does the same error twice in a row.
    3. Otherwise all ranks start again: in place if all guardians are there, and can rejoin Horovod's driver.

    A process may die outside `run` while another one enters it, before its guardian knows that. The guardian
    then waits like the others, so the whole job starts again.

    `begun`: a process of each guardian has imported hvdrecover. `now`: as in the faults' ``time``.
    """
    faults = [each for each in attempt.faults if each.get("round", attempt.rounds) == attempt.rounds]
    if attempt.in_run:  # guardians repair the faults without a round by themselves
        faults = [each for each in faults if each.get("round") is not None]
    if not faults:
        return None
    exits = [each for each in attempt.exits if each["round"] == attempt.rounds]
    fault = next((each for each in faults if not _is_of_others(each)), None)
    if fault is None:
        if len(faults) + len(exits) < guardians and now - faults[0]["time"] < waits.CULPRIT:
            return Together("wait", faults[0])
        fault = (exits or faults)[0]
    error = None
    if fault.get("end") in ("script_error", FIRST_ERROR.name) or fault in exits:
        error = cause(fault)
        error = error if error[2] else (*error[:2], 0, 0)  # without commits, its place is not known
    early = attempt.number == 1 and not attempt.rounds and not attempt.committed
    if error and (error == streak.error or (early and fault["age"] < FIRST_MINUTE)):
        return Together("end", fault, error)
    intact = begun and not attempt.in_run and guardians == attempt.guardians
    intact = intact and fault["fault"] not in ("lost_host", "launcher_lost")
    may = intact and streak.restarts < max_restarts
    return Together("restart" if may else "over", fault, error)


def ending(attempts: Sequence[Attempt]) -> Fault | None:
    """Return the fault that ends the last attempt at once, or None.

    A rank's own error is preferred to another rank's report of it.
    """
    # What follows faults outside `run` is decided by `together`, which marks those that end the job.
    decided = [each for each in attempts[-1].faults if each.get("final") or each.get("round") is None]
    found = [each for each in decided if _is_ending(each, attempts)]
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
        why = f"{fault['message']}. {_ANEW}"
        traceback = fault.get("traceback", "") if end.repair == "end" else ""
    if used >= max_restarts:
        return Outcome("end", 1, f"{used} restarts in a row have brought no progress")
    return Outcome("restart", 1, why, ends.pause(used + 2), used + 1, suspect, traceback)


def _over(attempts: Sequence[Attempt], ranks: int, *, stopping: bool) -> Outcome | None:
    """Return the outcome of a job that has done its work or has left; None for another."""
    last = attempts[-1]
    # The ranks have confirmed to each other that training is finished. If all slots ended like this, the
    # launcher's exit code does not count: it may have failed only because its terminal is gone.
    finished = last.ends.count("finished")
    if finished and (last.code == 0 or finished == len(last.ends) >= ranks):
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
    if set(last.ends) == {"untrained"} and (not last.faults or len(last.ends) >= ranks):
        return Outcome("end", 0, "the command has ended", message=_UNFINISHED if committed else _UNTRAINED)
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
    """Return the durable commits that the next attempt skips, as ``FIRST..LAST``, or None.

    A commit is suspect if the job failed twice from it in the same way at the same place, and so are later
    commits without progress. If the script itself failed, only the second failure must have begun at the
    commit: the first may have come on the way there. Kills, lack of memory, hangs and unreachable storage say
    nothing about a commit.
    """
    faults = attempts[-1].faults
    last = next((fault for fault in reversed(faults) if fault.get("loaded")), None)
    if last is None or not _is_own(last) or (last is not faults[-1] and ending(attempts) is None):
        return None
    own = (each for attempt in attempts for each in attempt.faults if each.get("loaded") and _is_own(each))
    # Of the same slot: one fault may kill the processes of several slots.
    alike = [each for each in own if each["at"] == last["at"] and cause(each) == cause(last)]
    again = last["end"] == "script_error" and _is_ending(last, attempts)
    loaded = [commit for each in alike if (commit := CommitId.parse(each["loaded"])) is not None]
    if not loaded or (len(alike) < 2 and not again):
        return None
    # Not by name: g10000 sorts before g9999.
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


_FOR_GOOD = {"fenced", "too_old"}  # ends that another start must not undo


def _is_own(fault: Fault) -> bool:
    """Return whether a process caused its own end."""
    return fault["end"] == "script_error" or (fault["fault"] == "crash" and fault["exit"] in _OWN_SIGNALS)


def _came_earlier(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    return cause(fault) in {cause(each) for attempt in attempts[:-1] for each in attempt.errors}


def _may_need_no_repair(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    """Return whether an error came only after a recovery in place, so that a fresh start may avoid it.

    A surviving process still has objects outside the state, such as a half-full list.
    """
    if fault.get("round") is not None or _came_earlier(
        fault, attempts
    ):  # with a round, all processes were new
        return False
    for each in attempts[-1].faults:
        if each["fault"] == "script_error" and cause(each) == cause(fault):
            break
        if not each.get("final") and not _is_of_others(each):
            return True
    return False


def _is_of_others(fault: Fault) -> bool:
    """Return whether a process has ended because of another process's fault, which is reported separately."""
    of_horovod = fault["fault"] == "crash" and fault.get("exit", 0) > 0
    return bool(fault.get("heard")) or fault.get("end") == "rendezvous" or of_horovod


def _is_ending(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    end = BY_NAME.get(fault.get("end", ""))
    if end is None or end.name != "script_error":
        return end is not None and end.repair in ("job", "end")
    if fault.get("again") or _came_earlier(fault, attempts):
        return True
    for each in attempts[-1].errors:
        if each is fault:
            break
        if each["at"] == fault["at"] and cause(each) == cause(fault):
            return True
    return False
