"""One commit in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId


@dataclass(frozen=True)
class Snapshot:
    """Everything that a job needs to resume from one commit; it does not change.

    Attributes:
        id: which commit this is.
        arenas: a safetensors file for each attribute of the state that holds tensors, by attribute name.
        state: all else, as plain JSON values; see `hvdrecover.elastic.state`.
        world_size: number of ranks when the commit was made.
        versions: of the framework, Horovod and hvdrecover.
        finished: whether the training function had returned.
        dataset: fingerprint of the training data as plain JSON values, or None.
    """

    id: CommitId
    arenas: dict[str, Arena]
    state: dict[str, Any]
    world_size: int
    versions: dict[str, str]
    finished: bool = False
    dataset: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(arena.layout.nbytes for arena in self.arenas.values())
