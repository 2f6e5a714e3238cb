"""Durable commits at a checkpoint root: who may write, writing, keeping the newest.

::

    ROOT/
      claims/g0003.json       who writes generation 3; a later claim fences an earlier one
      g0003-c00000120/        commit 120, made in generation 3
        model.safetensors     one file per attribute of the state that holds tensors
        MANIFEST.json         written last
        QUARANTINE.json       only if the commit was found broken: when and why
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FileEntry, Manifest
from hvdrecover.checkpoint.policy import expired
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.clock import Clock
from hvdrecover.errors import FencedError, ForeignRootError, StorageError
from hvdrecover.events import Events

CLAIMS = "claims"
QUARANTINE = "QUARANTINE.json"
_CLAIM = re.compile(r"g([0-9]{4,9})\.json")
_OF_THE_FILE_SYSTEM = {"lost+found"}


@dataclass(frozen=True)
class Claim:
    """A job's word that it writes a generation.

    Attributes:
        generation: the generation.
        job: identity of the job.
        acknowledged: whether a commit of this generation has become durable.
    """

    generation: int
    job: str
    acknowledged: bool


class Store:
    """One checkpoint root, as the process that may write to it sees it.

    Args:
        storage: the root.
        keep: how many complete commits to keep.
        job: identity of this job, the same on all its ranks and through all its recoveries.
        host: name of this host, for the claim and the manifests.
        events: where to report.
        clock: where times come from.
    """

    def __init__(
        self, storage: Storage, *, keep: int, job: str, host: str, events: Events, clock: Clock
    ) -> None:
        self.storage = storage
        self.events = events
        self.clock = clock
        self._keep = keep
        self._job = job
        self._host = host
        self._claimed = 0
        self._acknowledged = 0
        self._complete: set[CommitId] | None = None

    @property
    def url(self) -> str:
        """The root as messages show it."""
        return self.storage.url

    def commits(self) -> list[CommitId]:
        """The commits that have a folder, newest first; they may be incomplete or broken."""
        found = (CommitId.parse(name) for name in self.storage.names())
        return sorted((commit for commit in found if commit is not None), reverse=True)

    def claims(self) -> list[int]:
        """The claimed generations, newest first."""
        return _claims_among(self.storage.names(CLAIMS))

    def read_claim(self, generation: int) -> Claim:
        """One claim. One that is damaged is nobody's, and may have had commits."""
        try:
            fields = json.loads(self.storage.read(_claim_path(generation)))
            return Claim(generation, str(fields["job"]), bool(fields["acknowledged"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return Claim(generation, "", True)

    def check_is_ours(self) -> None:
        """Make sure that the root is empty or a checkpoint root.

        Raises:
            ForeignRootError: it holds files of another kind.
        """
        names = set(self.storage.names()) - _OF_THE_FILE_SYSTEM - {CLAIMS}
        claims = self.storage.names(CLAIMS)
        foreign = {name for name in names if CommitId.parse(name) is None}
        foreign |= {f"{CLAIMS}/{name}" for name in claims}
        if foreign and not _claims_among(claims):
            raise ForeignRootError(
                self.url,
                f"this folder holds files that hvdrecover did not write (such as '{min(foreign)}'), and was "
                "left untouched. Name an empty or a new folder as the checkpoint root.",
            )

    def claim_next(self) -> int:
        """Claim a generation later than all others for a job that starts.

        Returns:
            The claimed generation, at least 1.

        Raises:
            ForeignRootError: the root holds files of another kind.
            StorageError: the root can't be read or written.
        """
        self.check_is_ours()
        generation = max([0, *self.claims(), *(commit.generation for commit in self.commits())]) + 1
        while not self._create_claim(generation):
            generation += 1
        self._collect_leftovers(generation)
        return generation

    def claim(self, generation: int) -> None:
        """Claim a generation that this job has reached by a recovery.

        Raises:
            FencedError: another job, or a later generation of this one, has claimed the root.
        """
        if self._claimed == generation:
            return
        newest = next(iter(self.claims()), 0)
        ours = newest in (0, self._claimed) or self.read_claim(newest).job == self._job
        if newest >= generation or not ours:
            raise self._fenced(newest)
        if not self._create_claim(generation):
            raise self._fenced(generation)

    def write(self, snapshot: Snapshot, rank: int) -> None:
        """Make a commit durable, then delete what retention no longer keeps.

        Raises:
            FencedError: a later generation has claimed the root; the commit was not published.
            StorageError: the storage failed; earlier commits are untouched.
        """
        folder = snapshot.id.name
        self.claim(snapshot.id.generation)
        self._check_is_newest(snapshot.id.generation)
        # Left by an attempt that failed after it had been published, it would vouch for half-written files.
        self.storage.remove(f"{folder}/{manifests.FILE_NAME}")
        files = []
        for name, arena in snapshot.arenas.items():
            file = f"{name}.safetensors"
            digest = self.storage.write(f"{folder}/{file}", arena.buffer)
            files.append(FileEntry(file, arena.layout.nbytes, digest))
        manifest = Manifest(
            generation=snapshot.id.generation,
            commit=snapshot.id.commit,
            time=self.clock.now(),
            writer={"host": self._host, "pid": os.getpid(), "rank": rank},
            world_size=snapshot.world_size,
            versions=snapshot.versions,
            files=tuple(files),
            state=snapshot.state,
            finished=snapshot.finished,
        )
        self._check_is_newest(snapshot.id.generation)
        self.storage.publish(f"{folder}/{manifests.FILE_NAME}", manifests.dumps(manifest))
        self._acknowledge(snapshot.id.generation)
        self._prune(snapshot.id)

    def is_complete(self, commit: CommitId) -> bool:
        """Whether a commit has a manifest, valid or not."""
        return self.storage.size(f"{commit.name}/{manifests.FILE_NAME}") is not None

    def is_quarantined(self, commit: CommitId) -> bool:
        """Whether a commit has been found broken."""
        return self.storage.size(f"{commit.name}/{QUARANTINE}") is not None

    def _check_is_newest(self, generation: int) -> None:
        newest = next(iter(self.claims()), 0)
        if newest > generation:
            raise self._fenced(newest)

    def _acknowledge(self, generation: int) -> None:
        """Note once in the claim that commits exist, so that their loss can't pass for an empty root."""
        if self._acknowledged != generation:
            self.storage.publish(_claim_path(generation), self._claim_text(acknowledged=True))
            self._acknowledged = generation

    def _prune(self, newest: CommitId) -> None:
        try:
            if self._complete is None:
                self._complete = {commit for commit in self.commits() if self._counts(commit)}
            self._complete.add(newest)
            for commit in expired(sorted(self._complete), self._keep):
                self._discard(commit)
                self._complete.discard(commit)
        except StorageError as error:
            self._not_deleted(error)  # the new commit is durable all the same

    def _counts(self, commit: CommitId) -> bool:
        """Whether retention counts a commit; a quarantined one is left to the user."""
        return self.is_complete(commit) and not self.is_quarantined(commit)

    def _collect_leftovers(self, generation: int) -> None:
        """Delete what earlier generations began to write and never completed."""
        for commit in self.commits():
            if commit.generation >= generation or self.is_complete(commit) or self.is_quarantined(commit):
                continue
            message = f"{self.url}: removing {commit}, which was never completed"
            self.events.emit("leftover", message, level=logging.WARNING, commit=commit.name)
            try:
                self._discard(commit)
            except StorageError as error:
                self._not_deleted(error)
        try:
            self.storage.tidy()
        except StorageError as error:
            self._not_deleted(error)

    def _discard(self, commit: CommitId) -> None:
        # Without its manifest a folder is no commit, so a crash in between leaves nothing half-deleted.
        self.storage.remove(f"{commit.name}/{manifests.FILE_NAME}")
        self.storage.delete(commit.name)

    def _not_deleted(self, error: StorageError) -> None:
        self.events.emit("not_deleted", str(error), level=logging.WARNING, error=str(error))

    def _create_claim(self, generation: int) -> bool:
        created = self.storage.create(_claim_path(generation), self._claim_text(acknowledged=False))
        if created:
            self._claimed = generation
        return created

    def _claim_text(self, *, acknowledged: bool) -> bytes:
        fields: dict[str, Any] = {
            "job": self._job,
            "host": self._host,
            "pid": os.getpid(),
            "time": self.clock.now(),
            "acknowledged": acknowledged,
        }
        return json.dumps(fields).encode()

    def _fenced(self, newest: int) -> FencedError:
        return FencedError(
            self.url,
            f"generation {newest} has claimed this checkpoint root, so this process belongs to a job that "
            "was replaced and must stop. If two jobs share one root on purpose, give each its own.",
        )


def _claims_among(names: Iterable[str]) -> list[int]:
    """The generations whose claims have these names, newest first."""
    found = {int(match[1]): match[0] for match in map(_CLAIM.fullmatch, names) if match}
    return sorted((claim for claim, name in found.items() if name == _claim_name(claim)), reverse=True)


def _claim_name(generation: int) -> str:
    return f"g{generation:04d}.json"


def _claim_path(generation: int) -> str:
    return f"{CLAIMS}/{_claim_name(generation)}"
