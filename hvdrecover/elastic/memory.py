"""The commits that one rank holds in host memory."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.values import Json
from hvdrecover.elastic.contents import Contents, Present


class Memory:
    """The newest commit of one rank, and the memory for one more.

    The newest commit is overwritten by the next one, unless it is being written. Then the next one goes to
    other memory, and the two are used by turns: memory that is new to the process costs more time than
    copying into it. When the write ends, the memory of the older one is offered back to the system, so while
    nothing is in flight, one state's size is used, and never more than two.

    Args:
        contents: what a commit is a copy of.
        versions: of the framework, Horovod and hvdrecover.
        dataset: fingerprint of the training data, or None.

    Attributes:
        newest: the newest commit; None if making the last one was interrupted.
        attempt: the commit that was last begun, whether or not it was completed.
    """

    def __init__(
        self, contents: Contents, versions: dict[str, str], dataset: dict[str, Any] | None = None
    ) -> None:
        self._contents = contents
        self._versions = versions
        self._dataset = dataset
        self._positions = contents.positions()
        self._spare: Mapping[str, Arena] = {}
        self._abandoned: weakref.WeakSet[Arena] = weakref.WeakSet()
        self.newest: Snapshot | None = None
        self.attempt = CommitId(0, 0)

    def capture(
        self,
        commit: CommitId,
        present: Present,
        random: dict[str, Json],
        world_size: int,
        *,
        in_flight: Snapshot | None,
        finished: bool = False,
        unchanged: bool = False,
    ) -> Snapshot:
        """Copy the present state under a commit's identity.

        Args:
            commit: the identity.
            present: what the attributes hold.
            random: what `hvdrecover.elastic.randomness.Generators.capture` gave.
            world_size: number of ranks.
            in_flight: the snapshot that is being written and must not change, if any.
            finished: whether the training function has returned.
            unchanged: whether the newest commit has the same tensors, so that none has to be copied.
        """
        self.attempt = commit
        if unchanged and self.newest is not None:
            arenas = dict(self.newest.arenas)
        else:
            reuse = self._room(in_flight)
            self.newest = None  # an interrupted copy must not pass for a commit
            arenas = self._contents.copy(present, reuse)
        state = {**present.state(), "random": random}
        self.newest = Snapshot(
            commit, arenas, state, world_size, self._versions, finished, dataset=self._dataset
        )
        self.mark()
        return self.newest

    def adopt(self, snapshot: Snapshot) -> None:
        """Take a commit that has been loaded; the memory of those before is let go."""
        snapshot.dataset = self._dataset
        self.newest, self.attempt, self._spare = snapshot, snapshot.id, {}

    def pass_over(self) -> None:
        """Count a commit that this rank does not make, and the others may."""
        self.attempt = CommitId(self.attempt.generation, self.attempt.commit + 1)

    def abandon(self, snapshot: Snapshot) -> None:
        """Overwrite a snapshot never: somebody whom nobody watches any more may still be writing it."""
        self._abandoned.update(snapshot.arenas.values())

    def mark(self) -> None:
        """Note where the samplers are at the newest commit."""
        self._positions = self._contents.positions()

    def is_unchanged(self, present: Present) -> bool:
        """Whether the present state is that of the newest commit, bit for bit."""
        return (
            self.newest is not None
            and self.is_at_commit()
            and self._contents.is_copy(present, self.newest.state, self.newest.arenas)
        )

    def is_at_commit(self) -> bool:
        """Whether no sampler has moved since the newest commit."""
        return self.newest is not None and self._contents.positions() == self._positions

    def _room(self, in_flight: Snapshot | None) -> Mapping[str, Arena]:
        """Arenas that the next commit may overwrite."""
        newest = self.newest.arenas if self.newest is not None else {}
        writing = set(in_flight.arenas.values()) if in_flight is not None else set()
        if self._abandoned.union(writing).isdisjoint(newest.values()):
            return newest
        if in_flight is not None and not writing.isdisjoint(newest.values()):
            in_flight.superseded = True
        room, self._spare = self._spare, newest
        if not self._abandoned.isdisjoint(room.values()):
            return {}
        for arena in room.values():
            arena.take_back()
        return room
