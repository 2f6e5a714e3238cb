"""A job that starts anew on hosts which still have commits of its earlier start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.near.tier import Recalled
from hvdrecover.elastic.agreement.election import Left, Standing, revive
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.agreement.transfer import failure, stopped
from hvdrecover.elastic.context import Context

PassOver = Callable[[CommitId, str], None]


@dataclass(frozen=True)
class Root:
    """The checkpoint root, as rank 0 takes it.

    Attributes:
        claim: takes it, given which commit each start of a job has left on which host; returns the generation
            that the job may write, and the identity of the job's start.
        standing: returns what decides between near commits and durable ones; called with whether the durable
            commit has to be one that verifies, for which it is read.
    """

    claim: Callable[[Mapping[str, str]], tuple[int, str]]
    standing: Callable[[bool], Standing]


@dataclass(frozen=True)
class Claimed:
    """The new start of a job, and the near commit that it resumes from.

    Attributes:
        generation: that the job may write.
        job: identity of the job and of its start.
        root: the rank whose host has the near commit; None if the durable one is newer, or none counts.
        commit: the near commit; None if there is none.
        host: the host that has it; empty if there is none.
        durable: the newest durable commit, or None.
    """

    generation: int
    job: str
    root: int | None
    commit: CommitId | None
    host: str
    durable: CommitId | None

    def describe(self) -> str:
        """Return where the near commit was, and how much newer than the durable one it is."""
        if self.commit is None:
            return ""
        if self.durable is None:
            return f"in the memory of {self.host}, as no commit was durable"
        newer = self.commit.commit - self.durable.commit
        if newer <= 0:
            later = ", of a later start than the durable one" if newer else ""
            return f"in the memory of {self.host}{later}"
        count = f"{newer} commit{'' if newer == 1 else 's'}"
        return f"in the memory of {self.host}, {count} newer than the durable one"


def revived(context: Context, recalled: Recalled | None, root: Root | None, pass_over: PassOver) -> Claimed:
    """Return what the job resumes from; all ranks call this, and find the same.

    Args:
        context: the surroundings.
        recalled: what this rank's host has.
        root: on rank 0, the checkpoint root.
        pass_over: told of this rank's commit if another job has taken the root since.

    Raises:
        CheckpointError: the root can't be taken; on rank 0.
        StoppedError: the same, on the other ranks.
    """
    mine = None if recalled is None else [*_numbers(recalled.snapshot.id), recalled.start]
    rows = gather_json(context.world, [context.config.host, mine], "hvdrecover.near")
    error: Exception | None = None
    decided: dict[str, Any] = {}
    if root is not None:
        try:
            decided = _decide(root, [row[0] for row in rows], [_left(row[1]) for row in rows])
        except Exception as raised:
            error, decided = raised, failure(raised)
    decided = gather_json(context.world, decided, "hvdrecover.near.decided")[0]
    if error is not None:
        raise error
    if "error" in decided:
        raise stopped(0, decided)
    if recalled is not None and recalled.start not in decided["starts"]:
        pass_over(recalled.snapshot.id, "another job has taken the checkpoint root since")
    return _claimed(rows, decided)


def _decide(root: Root, hosts: Sequence[str], left: Sequence[Left | None]) -> dict[str, Any]:
    generation, job = root.claim(
        {
            each.start: f"{each.commit} in the memory of {host}"
            for host, each in zip(hosts, left, strict=True)
            if each is not None
        }
    )
    standing = root.standing(False)
    chosen = revive(left, standing)
    if chosen is None and any(each is not None and each.start in standing.starts for each in left):
        # A durable commit is newer. If it turns out to be damaged, the one before it need not be.
        standing = root.standing(True)
        chosen = revive(left, standing)
    durable = None if standing.durable is None else _numbers(standing.durable)
    found = {"generation": generation, "job": job, "root": chosen, "durable": durable}
    return {**found, "starts": list(standing.starts)}


def _claimed(rows: Sequence[Sequence[Any]], decided: Mapping[str, Any]) -> Claimed:
    root = decided["root"]
    chosen = None if root is None else _left(rows[root][1])
    return Claimed(
        generation=decided["generation"],
        job=decided["job"],
        root=root,
        commit=None if chosen is None else chosen.commit,
        host="" if root is None else rows[root][0],
        durable=None if decided["durable"] is None else CommitId(*decided["durable"]),
    )


def _numbers(commit: CommitId) -> list[int]:
    return [commit.generation, commit.commit]


def _left(mine: Sequence[Any] | None) -> Left | None:
    return None if mine is None else Left(CommitId(*mine[:2]), mine[2])
