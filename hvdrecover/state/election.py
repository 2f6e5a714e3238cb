"""The election of the source rank after a rendezvous. Pure functions.

The newest commit in any memory wins, and the lowest preferred rank that holds it is the source rank. If no
memory holds one, all processes have just started: the newest of the hosts' near commits and the durable one
wins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.checkpoint.commit_id import CommitId


@dataclass(frozen=True)
class Published:
    """The newest commit that one rank holds, or its host (``is_near``), and its start's number."""

    commit: CommitId
    is_near: bool = False
    start: int = 0


@dataclass(frozen=True)
class Election:
    """The outcome of an election.

    Attributes:
        holders: the ranks that hold the newest commit, in their memory if any does.
        revives: whether all processes have just started, and some of their hosts have commits of an earlier
            start. Then `newest` is None until the checkpoint root has been asked which of them count.
    """

    root: int
    newest: CommitId | None
    holders: tuple[int, ...] = ()
    revives: bool = False


def elect(
    published: Sequence[Published], prefer: Callable[[Sequence[int]], Sequence[int]] = lambda holders: holders
) -> Election:
    """Elect the lowest of the preferred ranks among those that hold the newest commit.

    While any rank has a memory, near commits of the same start of the job count as much; a rank that holds
    the commit in its memory goes before one that does not.
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
class Standing:
    """The answer of a checkpoint root to a job that has just claimed it.

    Attributes:
        starts: start to the generation of its claim; only starts that no other job has replaced.
        since: the generation of the claim of the start that made the durable commit.
    """

    starts: Mapping[str, int]
    durable: CommitId | None
    since: int


def revive(left: Sequence[tuple[CommitId | None, str]], standing: Standing) -> int | None:
    """Return the rank whose host has the commit to resume from; None if that is the durable one.

    ``left``: by rank, the commit that an earlier process has left on its host, and the start that made it.

    Generations are counted by each start of a job on its own once it trains, so commits are compared by the
    generation of their start's claim, and only then by their own.
    """
    floor = (standing.since, standing.durable or CommitId(0, 0))
    ranked = [
        ((standing.starts[start], commit), -rank)
        for rank, (commit, start) in enumerate(left)
        if commit is not None and start in standing.starts
    ]
    best = max(ranked, default=None)
    return -best[1] if best is not None and best[0] >= floor else None
