"""The table of ends: how processes and jobs end, and the reaction to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hvdrecover.config import FENCED, PREEMPTED

Repair = Literal["none", "in place", "job", "end"]
"""Nothing is left to do, restart the process in place, start the whole job again, or end the job."""

_AS_CRASH = "as after a crash"
_ENDS = "the job ends at once"
_AGAIN = "the whole job starts again from its newest durable commit"


@dataclass(frozen=True)
class End:
    """One way to end."""

    name: str  # for events and messages between our processes
    how: str  # how the process or the job has ended; for people
    repair: Repair  # the first action
    done: str  # the action in words
    # the job's exit code if it ends by this; None for the script's own, or if others decide
    code: int | None = None
    errors: tuple[str, ...] = ()  # names of the exceptions of ours by which it is recognised


# Of one training process.
OF_PROCESSES = (
    End("finished", "the training function has returned", "none", "the job ends when all ranks have", 0),
    End(
        "untrained",
        "exit code 0 before the job's first commit, without a call of a training function",
        "none",
        "the job ends when all ranks have, with a line that says so",
        0,
    ),
    End(
        "left",
        "it left after a preemption",
        "none",
        "the job ends if all ranks leave, else the others resume",
        PREEMPTED,
    ),
    End("removed", "its host no longer belongs to the job", "none", "the others resume"),
    End("dismissed", "Horovod ended it by SIGTERM", "none", "the others resume"),
    End(
        "crash",
        "a signal, or an error of Horovod because a rank was lost",
        "in place",
        "restarted in place, the second time after a second; after 3 deaths in a row without progress its "
        "slot is given up, and when Horovod then gives up, the whole job starts again",
        1,
    ),
    End("hang", "no progress for the hang timeout", "in place", _AS_CRASH, 1),
    End("out_of_memory", "the kernel killed it for lack of memory", "in place", _AS_CRASH, 1),
    End("early_exit", "exit code 0 before the training function has returned", "in place", _AS_CRASH, 1),
    End(
        "storage",
        "the storage is away where the job can't do without it",
        "in place",
        _AS_CRASH,
        1,
        ("StorageError",),
    ),
    End("rendezvous", "ranks were lost during a rendezvous", "in place", _AS_CRASH, 1, ("RecoveryError",)),
    End(
        "overtaken",
        "a later generation of its own job claimed the checkpoint root",
        "in place",
        _AS_CRASH,
        1,
        ("OvertakenError",),
    ),
    End(
        "script_error",
        "any other exception",
        "in place",
        "restarted in place; the same error at the same place again ends the job. Errors are the same if "
        "class and line are; the text may differ. If the error came right after a durable commit was "
        "loaded, the job first starts once more from the commit before that one. If the error came only "
        "after a recovery in place, the job first starts once more from the same commit",
    ),
    End(
        "first_error",
        "an exception before the job's first commit",
        "end",
        f"{_ENDS}, unless it follows a recovery in place: then all processes first start once more",
    ),
    End("apart", "it waited for the other ranks for the startup timeout", "job", _AGAIN, 1),
    End(
        "early_collective",
        "it joined the running job, and called a collective before the training function",
        "job",
        _AGAIN,
        1,
        ("EarlyCollectiveError",),
    ),
    End("fenced", "another job has claimed the checkpoint root", "end", _ENDS, FENCED, ("FencedError",)),
    End("too_old", "`HVDRECOVER_MAX_DURABLE_AGE` is over", "end", _ENDS, None, ("DurableAgeError",)),
    End(
        "no_progress",
        "the ranks rolled back 3 times in a row without a lost process, and without progress",
        "end",
        _ENDS,
        None,
        ("NoProgressError",),
    ),
    End(
        "unusable",
        "the checkpoint root is not ours, too new, does not fit, was emptied while near commits are left, or "
        "has only broken commits, or its server's host key is unknown",
        "end",
        _ENDS,
        None,
        (
            "EmptiedRootError",
            "ForeignRootError",
            "FormatVersionError",
            "HostKeyError",
            "MismatchError",
            "NoUsableCommitError",
        ),
    ),
    End(
        "wrong",
        "a setting, the state, the structure, the shards or the data are not what they must be",
        "end",
        _ENDS,
        None,
        ("ConfigError", "StateError", "StructureError", "ShardsError", "DataChangedError"),
    ),
)
# Of the whole job.
OF_JOBS = (
    End("gave_up", "Horovod gave up: too few hosts are left", "job", _AGAIN, 1),
    End("launcher_lost", "`horovodrun` was killed", "job", _AGAIN, 1),
    End("static", "any of these in a job that is not elastic (`--mpi`)", "job", _AGAIN, 1),
    End("restarts", "`--max-restarts` restarts in a row have brought no progress", "end", _ENDS, 1),
    End(
        "preempted",
        "SIGTERM or SIGUSR1 to the supervisor, or Slurm is about to end it",
        "end",
        "the job leaves at its next commit",
        PREEMPTED,
    ),
    End("interrupted", "Ctrl-C", "end", _ENDS, 130),
)
_BY_NAME = {end.name: end for end in (*OF_PROCESSES, *OF_JOBS)}
# Errors of a storage that waiting does not repair, if the job has never made a commit there.
_REFUSALS = {
    "AuthenticationException",
    "FileNotFoundError",
    "NoCredentialsError",
    "NotADirectoryError",
    "PermissionError",
}
FIRST_ERROR = _BY_NAME["first_error"]
_BY_ERROR = {error: end for end in OF_PROCESSES for error in end.errors}


def named(name: object) -> End | None:
    """Return the end of this name, if there is one."""
    return _BY_NAME.get(name) if isinstance(name, str) else None


def of_error(kinds: Sequence[str], *, first: bool) -> End:
    """Return the end that an exception of these kinds means; `first`: the job is still without a commit."""
    if first and not _REFUSALS.isdisjoint(kinds):
        return FIRST_ERROR
    known = next((_BY_ERROR[kind] for kind in kinds if kind in _BY_ERROR), None)
    return known or (FIRST_ERROR if first else _BY_NAME["script_error"])


def table() -> str:
    """Return the table as Markdown."""
    lines = ["| what ended, and how | what is done | exit code of the job |", "|---|---|---|"]
    for title, ends in (("process", OF_PROCESSES), ("job", OF_JOBS)):
        for end in ends:
            code = str(end.code) if end.code is not None else "-" if end.repair == "none" else "the script's"
            lines.append(f"| {title}: {end.how} | {end.done} | {code} |")
    return "\n".join(lines)
