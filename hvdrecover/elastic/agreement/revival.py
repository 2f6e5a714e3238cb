"""A job that starts anew on hosts which still have commits of its earlier start."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.near.recall import Recalled
from hvdrecover.elastic.agreement.election import Left, Standing, revive
from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.agreement.transfer import failure, stopped
from hvdrecover.elastic.context import Context

Claim = Callable[[], tuple[int, str, Standing]]
PassOver = Callable[[CommitId, str], None]


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
        count = f"{newer} commit{'' if newer == 1 else 's'}"
        return f"in the memory of {self.host}, {count} newer than the durable one"


def revived(context: Context, recalled: Recalled | None, claim: Claim | None, pass_over: PassOver) -> Claimed:
    """Return what the job resumes from; all ranks call this, and find the same.

    Args:
        context: the surroundings.
        recalled: what this rank's host has.
        claim: on rank 0, takes the checkpoint root; returns the generation, the job and how the root stands.
        pass_over: told of this rank's commit if another job has taken the root since.

    Raises:
        CheckpointError: the root can't be taken; on rank 0.
        StoppedError: the same, on the other ranks.
    """
    mine: dict[str, Any] = {"host": context.config.host, "left": None}
    if recalled is not None:
        commit = recalled.snapshot.id
        mine["left"] = [commit.generation, commit.commit, recalled.job]
    error: Exception | None = None
    if claim is not None:
        try:
            mine |= _told(*claim())
        except Exception as raised:
            error, mine = raised, {**mine, **failure(raised)}
    rows = gather_json(context.world, mine, "hvdrecover.near")
    if error is not None:
        raise error
    if "error" in rows[0]:
        raise stopped(0, rows[0])
    found = _claimed(rows)
    if recalled is not None and Left(recalled.snapshot.id, recalled.job).start not in rows[0]["starts"]:
        pass_over(recalled.snapshot.id, "another job has taken the checkpoint root since")
    return found


def _told(generation: int, job: str, standing: Standing) -> dict[str, Any]:
    durable = standing.durable
    return {
        "generation": generation,
        "job": job,
        "starts": dict(standing.starts),
        "durable": None if durable is None else [durable.generation, durable.commit],
        "since": standing.since,
    }


def _claimed(rows: list[Mapping[str, Any]]) -> Claimed:
    first = rows[0]
    durable = None if first["durable"] is None else CommitId(*first["durable"])
    left = [None if row["left"] is None else Left(CommitId(*row["left"][:2]), row["left"][2]) for row in rows]
    root = revive(left, Standing(first["starts"], durable, first["since"]))
    chosen = None if root is None else left[root]
    return Claimed(
        generation=first["generation"],
        job=first["job"],
        root=root,
        commit=None if chosen is None else chosen.commit,
        host="" if root is None else rows[root]["host"],
        durable=durable,
    )
