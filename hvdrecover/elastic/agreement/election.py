"""The election: which rank's commit the job resumes from after a rendezvous. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.checkpoint.commit_id import CommitId

Preference = Callable[[Sequence[int]], Sequence[int]]


@dataclass(frozen=True)
class Published:
    """One rank's word about the newest commit that it holds.

    Attributes:
        commit: which one; generation 0 stands for none.
        is_near: whether it is one that a process before this one has left on the host.
        start: a number that stands for the start of the job that made it.
    """

    commit: CommitId
    is_near: bool = False
    start: int = 0


@dataclass(frozen=True)
class Election:
    """The outcome.

    Attributes:
        root: the rank that sends; rank 0 if no commit is held.
        newest: the newest commit that is held, or None.
        holders: the ranks that hold it, in their memory if any does.
        revives: whether all processes have just started, and some of their hosts have commits of before. Then
            `newest` is None until the checkpoint root has been asked which of them count.
    """

    root: int
    newest: CommitId | None
    holders: tuple[int, ...] = ()
    revives: bool = False


def elect(published: Sequence[Published], prefer: Preference = lambda holders: holders) -> Election:
    """Elect the lowest of the preferred ranks among those that hold the newest commit.

    While any rank has a memory, near commits of the same start of the job count as much; one who holds the
    commit in its memory goes before one who doesn't.

    Args:
        published: by rank.
        prefer: chooses among the ranks that hold it.
    """
    live = [each for each in published if each.commit.generation and not each.is_near]
    if not live:
        return Election(0, None, revives=any(each.commit.generation for each in published))
    start = live[0].start
    counting = {
        rank: each.commit for rank, each in enumerate(published) if not each.is_near or each.start == start
    }
    newest = max(counting.values())
    all_holders = tuple(rank for rank, commit in counting.items() if commit == newest)
    holders = tuple(rank for rank in all_holders if not published[rank].is_near) or all_holders
    return Election(min(prefer(holders)), newest, holders)


@dataclass(frozen=True)
class Left:
    """A commit that a process before this one has left on its host.

    Attributes:
        commit: which one.
        start: identity of the start of the job that made it.
    """

    commit: CommitId
    start: str


@dataclass(frozen=True)
class Standing:
    """The answer of a checkpoint root to a job that has just taken it.

    Attributes:
        starts: start to the generation under which it took the root; only starts that nobody has replaced.
        durable: the newest durable commit, or None.
        since: the generation under which the start took the root that made that one.
    """

    starts: Mapping[str, int]
    durable: CommitId | None
    since: int


def revive(left: Sequence[Left | None], standing: Standing) -> int | None:
    """Return the rank whose host has the commit to resume from; None if that is the durable one.

    Generations are counted by each start of a job on its own once it trains, so commits are compared by the
    generation under which their start took the root, and only then by their own.

    Args:
        left: by rank, what its host has.
        standing: of the checkpoint root.
    """
    floor = (standing.since, standing.durable or CommitId(0, 0))
    ranked = [
        ((standing.starts[each.start], each.commit), -rank)
        for rank, each in enumerate(left)
        if each is not None and each.start in standing.starts
    ]
    best = max(ranked, default=None)
    return -best[1] if best is not None and best[0] >= floor else None
