"""Messages about a recovery, as pure functions."""

from __future__ import annotations

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.errors import NoProgressError, StoppedError

_NO_ROOT = ", without a checkpoint root: commits are in memory only"


def agreed(
    agreement: Agreement,
    size: int,
    root: str,
    seconds: float,
    reached: tuple[int, int] = (0, 0),
    near: str = "",
) -> str:
    """Return what the ranks resume from, and what is done once more.

    Args:
        agreement: what they agreed on.
        size: number of ranks.
        root: the checkpoint root, without credentials.
        seconds: how long it took.
        reached: how far the job had come, as far as is known: commits at which the state had changed, and
            steps since.
        near: of a near commit, where it was, and how much newer than the durable one it is.
    """
    commit, before = agreement.snapshot.id.commit, agreement.snapshot.world_size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    change = f"it was {before}" if before != size else "as before"
    line = {
        "initial": f"starting from the beginning on {ranks}{'' if root else _NO_ROOT}",
        "durable": f"resumed from commit {commit} at {root} on {ranks} ({change})",
        "near": f"resumed from commit {commit} {near}, on {ranks} ({change})",
        "memory": f"resuming from commit {commit} in memory on {ranks}",
    }[agreement.source]
    changed = agreement.snapshot.state["random"]["stream"]
    return f"{line}{_repeated(reached[0] - changed, reached[1])}; {seconds:.2f} s"


def _repeated(commits: int, steps: int) -> str:
    if commits < 0 or not (commits or steps):
        return ""
    counted = [f"{commits} commit{'s' if commits > 1 else ''}"] if commits else []
    counted += [f"{steps} step{'s' if steps > 1 else ''}"] if steps else []
    return f"; {' and '.join(counted)} {'are' if commits + steps > 1 else 'is'} repeated"


def finished(commit: CommitId, root: str) -> str:
    """The run has come to its end."""
    return f"finished at commit {commit.commit}; {root} holds the result"


def finished_before(commit: CommitId) -> str:
    """The run had come to its end in an earlier start."""
    return (
        f"this run was finished at commit {commit.commit}, and its state is restored; "
        "to continue it, start it by `hvdrecover run --reopen`, or with HVDRECOVER_REOPEN=1; to train anew, "
        "name another checkpoint root"
    )


def reopened(commit: CommitId) -> str:
    """The run had come to its end in an earlier start, and continues all the same."""
    return f"this run was finished at commit {commit.commit}; it is reopened, and continues from there"


def leaving(commit: CommitId, root: str, *, whole: bool) -> str:
    """Ranks leave after a preemption."""
    if not whole:
        return f"this host leaves at commit {commit.commit}; the others continue"
    if not root:
        return f"stopping at commit {commit.commit}; without a checkpoint root, the state is lost"
    return f"stopping at commit {commit.commit}, which is durable; start the job again to continue"


def stopped(kind: str, deed: str) -> StoppedError:
    """Return what the other ranks raise when rank 0 has had an error of this class."""
    return StoppedError(f"rank 0 {deed} ({kind}); its error says why", kind)


def out_of_step(waits: str) -> str:
    """Return what is wrong if each rank waits for another one, and what to do, after the word "the"."""
    return (
        f"ranks are out of step: each waits in a collective that another rank has not called ({waits}). "
        "Have all ranks call the same collectives, in the same order"
    )


def no_progress(
    commit: int,
    steps: int,
    rollbacks: int,
    reason: str,
    *,
    rank: int | None = None,
    seconds: float = 0.0,
    limit: int = 0,
    where: str = "",
    waits: str = "",
) -> NoProgressError:
    """Return the error of ranks that have come back to one commit again and again.

    Args:
        commit: its number.
        steps: how many steps beyond it were reached.
        rollbacks: how often in a row they have come back since.
        reason: what the last collective failed with on this rank.
        rank: the rank that the others waited for, or None if none is known.
        seconds: for how long that one had shown no progress.
        limit: for how many seconds ranks wait for one that shows none; 0 if that isn't known.
        where: the line of the user's own that it came to then, if that is known.
        waits: which rank waits in which collective, if each waits for another rank.
    """
    head = (
        f"commit {commit}: the ranks have rolled back {rollbacks} times in a row without getting farther "
        f"than {steps} steps beyond it, though none of them was lost"
    )
    if waits:
        cause = f"The {out_of_step(waits)}."
    elif rank is None:
        cause = (
            f"The last collective failed with: {reason}\nIf all ranks call it alike, and the network is "
            "sound, look for a rank that is busy for too long, and put that into "
            "`with recover.paused():`, on all ranks."
        )
    else:
        longer = f", longer than the {limit} s that the others wait" if limit else ""
        cause = (
            f"Rank {rank} was busy for {seconds:.0f} s{f' before {where}' if where else ''}{longer}. Put "
            "what takes so long into `with recover.paused():`, on all ranks, or give a longer "
            "--hang-timeout."
        )
    return NoProgressError(f"{head}. {cause}", commit, rank)
