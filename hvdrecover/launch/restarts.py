"""The decision after an attempt (one start of the whole job); pure functions."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.config import PREEMPTED
from hvdrecover.launch import ends, waits
from hvdrecover.launch.ends import FIRST_ERROR, SAME_ERROR, Cause, End

FIRST_MINUTE = 60.0  # seconds after the imports in which an error of a script counts as its bug
CALM = 3600.0  # seconds without a fault after which the count of restarts begins again
_CAUSES = 50  # known errors of the script in one message, which must fit into a send buffer
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0

# Signals that a process causes itself; others come from outside.
_OWN_SIGNALS = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}

_UNTRAINED = (
    "the command has ended without a commit of hvdrecover's. After a fault, all its ranks would have started "
    "again from its own checkpoints, if it writes any. With a state, it would resume from its last commit; "
    "docs/torch.md shows how"
)
_UNFINISHED = (
    "the command has ended, and has not called state.finish(), so the run is not marked finished: a later "
    "start resumes from its last commit"
)
_STOPPED = "stopped after a preemption; start it again to continue"
_ANEW = (
    "This error came after a recovery in place, and a fresh start may avoid it: all processes start once more"
)

Fault = dict[str, Any]
"""A guardian's report of a fault."""


@dataclass
class Attempt:
    """One start of the job."""

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
    """The decision after an attempt."""

    action: Literal["end", "restart"]  # end the job or start it again
    code: int  # the exit code, if it ends
    reason: str  # why, in words
    pause: float = 0.0  # seconds until it is started again
    # restarts in a row, the one to come included, before which there was no progress
    without_progress: int = 0
    # durable commits that the next start is to pass over, as ``FIRST..LAST``, or None
    suspect: str | None = None
    # traceback to print, of the error that ends the job or this start; or an empty string
    traceback: str = ""
    message: str = ""  # for people, before the traceback; by default the reason


@dataclass(frozen=True)
class Streak:
    """Restarts of the job in a row: new starts, and restarts of all ranks together in place."""

    restarts: int = 0
    error: tuple[Any, ...] | None = None  # the script's error in the last fault, or None
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
    error: tuple[Any, ...] | None = None  # the script's, if that is the fault; equal if it repeats


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

    Args:
        attempt: the present one.
        streak: restarts before this fault.
        guardians: how many are connected.
        begun: whether a process of each of them has imported hvdrecover.
        now: the time, as in the faults' ``time``.
        max_restarts: how many restarts in a row are allowed.
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
        point = tuple(fault["point"]) if fault["point"][0] else None
        error = (fault["exit"], Cause.of(fault).error, point)
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
    found = [each for each in attempts[-1].faults if each.get("final") and _is_ending(each, attempts)]
    return min(found, key=lambda fault: bool(fault.get("heard")), default=None)


def outcome(
    attempts: Sequence[Attempt], without_progress: int, *, ranks: int, stopping: bool, max_restarts: int
) -> Outcome:
    """Decide whether the job ends or starts again after the last attempt."""
    last = attempts[-1]
    # The ranks have confirmed to each other that training is finished. If all slots ended like this, the
    # launcher's exit code does not count: it may have failed only because its terminal is gone.
    finished = [each for each in last.ends if each == "finished"]
    if finished and (last.code == 0 or len(finished) == len(last.ends) >= ranks):
        return Outcome("end", 0, "the training is finished")
    if stopping or "preempted" in last.ends:
        return Outcome("end", PREEMPTED, _STOPPED + _unrepaired(last))
    committed = any(attempt.committed for attempt in attempts)
    if last.code == 0 and not (committed and any(attempt.in_run for attempt in attempts)):
        if not last.ends and not committed:
            return Outcome("end", 0, "the command has ended")
        if set(last.ends) == {"untrained"} and (not last.faults or len(last.ends) >= ranks):
            message = _UNFINISHED if committed else _UNTRAINED
            return Outcome("end", 0, "the command has ended", message=message)
    suspect, fault = suspected(attempts), ending(attempts)
    farthest = max((each.point for each in attempts[:-1]), default=(-1, 0))
    progress = last.point > farthest and not last.over
    used = 0 if progress else without_progress
    why, traceback = reason(last), ""
    end = None if fault is None else _end(fault)
    if (
        fault is not None
        and end is not None
        and (end.repair == "end" or (end.repair == "in place" and not suspect))
    ):
        if used >= max_restarts or end.name in _FOR_GOOD or not _may_need_no_repair(fault, attempts):
            return _ended(last, fault, end, ranks)
        why = f"{fault['message']}. {_ANEW}"
        traceback = str(fault.get("traceback") or "") if end.repair == "end" else ""
    if used >= max_restarts:
        return Outcome("end", 1, f"{used} restarts in a row have brought no progress")
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**used)
    return Outcome("restart", 1, why, pause, used + 1, suspect, traceback)


def known(attempts: Sequence[Attempt]) -> dict[str, Any]:
    """Return the facts about earlier starts that the processes of the next one need."""
    errors = [error for attempt in attempts for error in attempt.errors]
    causes = list(dict.fromkeys(map(Cause.of, reversed(errors))))[:_CAUSES]
    return {
        "committed": any(attempt.committed for attempt in attempts),
        "in_run": any(attempt.in_run for attempt in attempts[-1:]),
        "root": next((each.root for each in reversed(attempts) if each.root), ""),
        "causes": [{"exit": each.returncode, "identity": each.error, "point": each.point} for each in causes],
    }


def is_first(fault: Fault) -> bool:
    """Return whether a fault is an error of the script before the job's first commit."""
    return _end(fault) == FIRST_ERROR


def first_errors(attempt: Attempt) -> list[Fault]:
    """Return the errors of the script, one a rank, that came before the job's first commit."""
    return [fault for fault in attempt.faults if is_first(fault)]


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
    failures = [fault for attempt in attempts for fault in attempt.faults]
    alike = [
        each
        for each in failures
        # Of the same slot: one fault may kill the processes of several slots.
        if each.get("loaded")
        and _is_own(each)
        and each["at"] == last["at"]
        and Cause.of(each) == Cause.of(last)
    ]
    again = last.get("end") == "script_error" and _is_ending(last, attempts)
    if not again and len(alike) < 2:
        return None
    # Not by name: g10000 sorts before g9999.
    first = min(filter(None, (CommitId.parse(str(each["loaded"])) for each in alike)), default=None)
    return f"{first.name}..{max(CommitId(*each['commit']) for each in alike).name}" if first else None


def reason(attempt: Attempt) -> str:
    """Return why a start has ended, in words."""
    message = attempt.faults[-1].get("message") if attempt.faults else ""
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
    return fault.get("end") == "script_error" or (fault["fault"] == "crash" and fault["exit"] in _OWN_SIGNALS)


def _unrepaired(attempt: Attempt) -> str:
    """Return the fault after which nothing was trained any more, in words; empty if there is none."""
    last = attempt.faults[-1] if attempt.faults else {}
    lost = bool(last) and tuple(last.get("point", attempt.point)) >= attempt.point
    return f". The job had made no progress after its last fault: {last['message']}" if lost else ""


def _may_need_no_repair(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    """Return whether an error came only after a recovery in place, so that a fresh start may avoid it.

    A surviving process still has objects outside the state, such as a half-full list.
    """
    cause = Cause.of(fault)
    if fault.get("round") is not None:  # all processes were new
        return False
    if cause in {Cause.of(each) for attempt in attempts[:-1] for each in attempt.errors}:
        return False
    before = takewhile(
        lambda each: each.get("fault") != "script_error" or Cause.of(each) != cause, attempts[-1].faults
    )
    return any(not each.get("final") and not _is_of_others(each) for each in before)


def _is_of_others(fault: Fault) -> bool:
    """Return whether a process has ended because of another process's fault, which is reported separately."""
    of_horovod = fault["fault"] == "crash" and fault.get("exit", 0) > 0
    return bool(fault.get("heard")) or fault.get("end") == "rendezvous" or of_horovod


def _end(fault: Fault) -> End | None:
    return ends.named(fault.get("end"))


def _is_ending(fault: Fault, attempts: Sequence[Attempt]) -> bool:
    end = _end(fault)
    if end is None or end.name != "script_error":
        return end is not None and end.repair in ("job", "end")
    before = {Cause.of(each) for attempt in attempts[:-1] for each in attempt.errors}
    return bool(fault.get("again")) or Cause.of(fault) in before


def _ended(attempt: Attempt, fault: Fault, end: End, ranks: int) -> Outcome:
    if end == FIRST_ERROR:
        return _ended_at_first(attempt, fault, ranks)
    told = str(fault.get("traceback") or "") if end.code is None else ""
    why = heading = SAME_ERROR
    if end.repair == "end":
        why = f"{end.how}: {fault.get('detail')}"
        # If one end stands for several errors, its description is too vague as a heading.
        heading = "the job ends with this error:" if len(end.errors) > 1 else f"{end.how}:"
    code = end.code or int(fault.get("exit") or 1)
    return Outcome("end", code, why, traceback=told, message=heading if told else "")


def _ended_at_first(attempt: Attempt, fault: Fault, ranks: int) -> Outcome:
    """Show the error of one rank, with the counts of ranks that failed alike and otherwise."""
    failed = first_errors(attempt)
    alike = sum(Cause.of(each).error == Cause.of(fault).error for each in failed)
    how = FIRST_ERROR.how
    count = f"{alike} of {max(ranks, len(failed))} ranks ended like this"
    if others := len(failed) - alike:
        count += f", {others} in another way"
    shown = str(fault.get("traceback") or f"{fault['detail']}\n")
    code, why = int(fault.get("exit") or 1), f"{how}: {fault['detail']}"
    return Outcome("end", code, why, traceback=shown, message=f"{how}; {count}:")
