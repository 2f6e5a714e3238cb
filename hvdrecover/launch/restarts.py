"""What follows from the end of one start of a job; pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from hvdrecover.config import PREEMPTED

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


@dataclass
class Attempt:
    """One start of the whole job.

    Attributes:
        number: counted from 1.
        code: how the launcher has ended; negative for a signal.
        ends: how slots have ended, by their own account: finished, preempted (with the whole job), left (with
            their host) or stopped.
        faults: what guardians told of faults.
        commit: the newest commit that was heard of, as generation and number.
        apart: whether it was ended because the ranks had not come together.
    """

    number: int
    code: int = 0
    ends: list[str] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    commit: tuple[int, int] = (0, 0)
    apart: bool = False

    @property
    def error(self) -> dict[str, Any] | None:
        """The last failure of the script itself."""
        own = [each for each in self.faults if each.get("fault") == "script_error"]
        return own[-1] if own else None


@dataclass(frozen=True)
class Outcome:
    """What to do now.

    Attributes:
        action: end the job or start it again.
        code: the exit code, if it ends.
        reason: why, in words.
        pause: seconds until it is started again.
        without_progress: restarts in a row, the one to come included, before which there was no progress.
    """

    action: Literal["end", "restart"]
    code: int
    reason: str
    pause: float = 0.0
    without_progress: int = 0


def outcome(
    attempts: Sequence[Attempt], without_progress: int, *, stopping: bool, max_restarts: int
) -> Outcome:
    """Decide what to do after the last of some starts.

    Args:
        attempts: all starts so far.
        without_progress: restarts in a row, up to that of the last start, before which there was no progress.
        stopping: whether the job was to leave.
        max_restarts: how many restarts in a row may bring no progress.
    """
    last, before = attempts[-1], attempts[-2] if len(attempts) > 1 else None
    if last.code == 0 and "finished" in last.ends:  # which all ranks have confirmed to each other
        return Outcome("end", 0, "the training is finished")
    if stopping or "preempted" in last.ends:
        return Outcome("end", PREEMPTED, "stopped after a preemption; start it again to go on")
    if last.code == 0 and not last.ends:
        return Outcome("end", 0, "the command has ended")
    if before is not None and _is_same(last.error, before.error):
        code = int((last.error or {}).get("exit") or 1)
        return Outcome("end", code, "the script has failed in the same way at the same commit again")
    progress = before is None or last.commit[1] > max(each.commit[1] for each in attempts[:-1])
    used = 0 if progress else without_progress
    if used >= max_restarts:
        return Outcome("end", 1, f"{used} restarts in a row have brought no progress")
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**used)
    return Outcome("restart", 1, reason(last), pause, used + 1)


def reason(attempt: Attempt) -> str:
    """Why a start has ended, in words."""
    if attempt.apart:
        return f"the ranks have not come together; {attempt.faults[-1].get('message')}"
    if attempt.code < 0:
        return f"the launcher was killed by signal {-attempt.code}"
    if attempt.faults:
        return f"Horovod gave up; the last fault: {attempt.faults[-1].get('message')}"
    return f"the launcher ended with exit code {attempt.code}"


def _is_same(error: dict[str, Any] | None, before: dict[str, Any] | None) -> bool:
    if error is None or before is None:
        return False
    commits = [(each.get("commit") or [0, 0])[1] for each in (error, before)]
    return bool(error.get("detail") == before.get("detail") and commits[0] == commits[1])
