"""Messages about a recovery, as pure functions."""

from __future__ import annotations

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.elastic.agreement.transfer import Agreement
from hvdrecover.errors import StoppedError


def agreed(
    agreement: Agreement, size: int, root: str, seconds: float, reached: tuple[int, int] = (0, 0)
) -> str:
    """Return what the ranks resume from, and what is done once more.

    Args:
        agreement: what they agreed on.
        size: number of ranks.
        root: the checkpoint root, without credentials.
        seconds: how long it took.
        reached: how far the job had come, as far as is known: commits at which the state had changed, and
            steps since.
    """
    commit, before = agreement.snapshot.id.commit, agreement.snapshot.world_size
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    change = f"it was {before}" if before != size else "as before"
    line = {
        "initial": f"starting from the beginning on {ranks}",
        "durable": f"resumed from commit {commit} at {root} on {ranks} ({change})",
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
        "to train anew, name another checkpoint root"
    )


def leaving(commit: CommitId, root: str, *, whole: bool) -> str:
    """Ranks leave after a preemption."""
    if not whole:
        return f"this host leaves at commit {commit.commit}; the others go on"
    if not root:
        return f"stopping at commit {commit.commit}; without a checkpoint root, the state is lost"
    return f"stopping at commit {commit.commit}, which is durable; start the job again to go on"


def stopped(kind: str, deed: str) -> StoppedError:
    """Return what the other ranks raise when rank 0 has met an error of this class."""
    return StoppedError(f"rank 0 {deed} ({kind}); its error says why", kind)
