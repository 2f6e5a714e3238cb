"""One commit in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hvdrecover.checkpoint.arena import Arena, digest
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import TENSORS, FileEntry, HasState, Manifest


@dataclass(frozen=True)
class Snapshot(HasState):
    """Everything that a job needs to resume from one commit; it does not change.

    Attributes:
        id: which commit this is.
        arenas: a safetensors file for each attribute of the state that holds tensors, by attribute name.
        state: all else, as plain JSON values, and mappings that are read when it is written; see
            `hvdrecover.state.state`.
        dataset: version of the training data as plain JSON values, or None.
        digests: of the files, by attribute name; None if they have not been computed.
        job: identity of the start of the job that made it, as ``JOB/START``; of near commits only.
    """

    id: CommitId
    arenas: dict[str, Arena]
    state: dict[str, Any]
    world_size: int
    versions: dict[str, str]
    finished: bool = False
    dataset: dict[str, Any] | None = None
    digests: dict[str, str] | None = None
    job: str = ""

    @classmethod
    def of(cls, manifest: Manifest, arenas: dict[str, Arena]) -> Snapshot:
        files = manifest.by_attribute
        return cls(
            id=manifest.id,
            arenas=arenas,
            state=manifest.state,
            world_size=manifest.world_size,
            versions=manifest.versions,
            finished=manifest.finished,
            dataset=manifest.dataset,
            digests={name: files[name].digest for name in arenas},
            job=str(manifest.writer.get("job", "")),
        )

    def digested(self) -> Snapshot:
        """Return the commit with the digests of its files; a gigabyte takes 50 ms, if they are not known."""
        if self.digests is not None:
            return self
        return replace(self, digests={name: digest(arena.buffer) for name, arena in self.arenas.items()})

    def manifest(self, digests: Mapping[str, str], writer: dict[str, Any], time: float) -> Manifest:
        files = [
            FileEntry(f"{name}{TENSORS}", arena.layout.nbytes, digests[name])
            for name, arena in self.arenas.items()
        ]
        return Manifest(
            generation=self.id.generation,
            commit=self.id.commit,
            time=time,
            writer=writer,
            world_size=self.world_size,
            versions=self.versions,
            files=tuple(files),
            state=self.state,
            dataset=self.dataset,
            finished=self.finished,
        )

    @property
    def layouts(self) -> dict[str, Layout]:
        return {name: arena.layout for name, arena in self.arenas.items()}

    @property
    def nbytes(self) -> int:
        return sum(arena.layout.nbytes for arena in self.arenas.values())
