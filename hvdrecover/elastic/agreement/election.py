"""The election: which rank's memory the job resumes from after a rendezvous. A pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdrecover.checkpoint.commit_id import CommitId

Preference = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Election:
    """The outcome.

    Attributes:
        root: the rank that sends; rank 0 if no memory holds a commit.
        newest: the newest commit in any memory, or None.
        holders: the ranks whose memory holds it.
    """

    root: int
    newest: CommitId | None
    holders: tuple[int, ...] = ()


def elect(published: Sequence[CommitId], prefer: Preference = lambda holders: holders) -> Election:
    """Elect the lowest of the preferred ranks among those that hold the newest commit.

    Args:
        published: each rank's newest commit in memory; generation 0 stands for none.
        prefer: chooses among the ranks that hold it.
    """
    newest = max(published)
    if newest.generation == 0:
        return Election(0, None)
    holders = tuple(rank for rank, commit in enumerate(published) if commit == newest)
    return Election(min(prefer(holders)), newest, holders)
