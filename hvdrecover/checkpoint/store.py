"""Durable commits at a checkpoint root, as the process sees it that may write there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from hvdrecover.checkpoint import claims, leases, root
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FileEntry, Manifest
from hvdrecover.checkpoint.pruning import Pruner, delete_unless_read
from hvdrecover.checkpoint.retention import metric_of
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.checkpoint.storage.interface import TEMPORARY
from hvdrecover.clock import Clock
from hvdrecover.errors import FencedError, ForeignRootError, StorageError
from hvdrecover.events import Events

_OF_THE_FILE_SYSTEM = {"lost+found"}


class Store:
    """One checkpoint root, as the process that may write to it sees it.

    Args:
        storage: the root.
        keep: which complete commits to keep; a number stands for the newest so many.
        job: identity of this job, the same on all its ranks and through all its recoveries.
        host: name of this host, for the claim and the manifests.
        events: where to report.
        clock: where times come from.

    Attributes:
        claims: the claims at the root.
    """

    def __init__(
        self, storage: Storage, *, keep: int | Keep, job: str, host: str, events: Events, clock: Clock
    ) -> None:
        self.storage = storage
        self.events = events
        self.clock = clock
        self.claims = Claims(storage, job=job, host=host, clock=clock)
        self._best = Keep.of(keep).best
        self._host = host
        self._pruner = Pruner(storage, Keep.of(keep), clock)

    @property
    def url(self) -> str:
        """The root as messages show it."""
        return self.storage.url

    def claim_next(self) -> int:
        """Claim a generation later than all others for a job that starts, and clean up after those.

        Returns:
            The claimed generation, at least 1.

        Raises:
            ForeignRootError: the root holds files of another kind; nothing was touched.
            StorageError: the root can't be read or written.
        """
        check_is_ours(self.storage)
        commits = root.commits(self.storage)
        generation = self.claims.take_after(
            max([self.claims.newest(), *(commit.generation for commit in commits)])
        )
        self._collect_leftovers(generation)
        try:
            leases.collect(self.storage, self.clock.now())
            self.storage.tidy()
        except StorageError as error:
            self._not_deleted(error)
        return generation

    def write(self, snapshot: Snapshot, rank: int, durable: Callable[[], None] = lambda: None) -> None:
        """Make a commit durable, then delete what retention no longer keeps.

        Args:
            snapshot: the commit.
            rank: the writer's rank, for the manifest.
            durable: called as soon as the commit is durable; deleting may take as long as writing.

        Raises:
            FencedError: a later generation has claimed the root; the commit was not published.
            StorageError: the storage failed; earlier commits are untouched.
        """
        generation, path = snapshot.id.generation, root.manifest_path(snapshot.id)
        self.claims.take(generation)
        self.claims.check(generation)
        # Left by an attempt that failed after it had been published, it would vouch for half-written files.
        self.storage.remove(path)
        files = []
        for name, arena in snapshot.arenas.items():
            file = f"{name}{root.TENSORS}"
            digest = self.storage.write(f"{snapshot.id.name}/{file}", arena.buffer)
            files.append(FileEntry(file, arena.layout.nbytes, digest))
        manifest = Manifest(
            generation=generation,
            commit=snapshot.id.commit,
            time=self.clock.now(),
            writer={"host": self._host, "pid": os.getpid(), "rank": rank},
            world_size=snapshot.world_size,
            versions=snapshot.versions,
            files=tuple(files),
            state=snapshot.state,
            dataset=snapshot.dataset,
            finished=snapshot.finished,
        )
        text = manifests.dumps(manifest)
        self.claims.check(generation)
        self.storage.publish(path, text)
        self.claims.acknowledge(generation)
        durable()
        self._prune(manifest)

    def _prune(self, manifest: Manifest) -> None:
        self._warn_of_no_metric(manifest)
        try:
            self._pruner.note(manifest)
            self.claims.check(manifest.generation)
            self._pruner.prune()
        except FencedError:
            return  # a job that was replaced deletes nothing; its next write says so
        except Exception as error:  # of any kind: the new commit is durable all the same
            self._not_deleted(error)

    def _warn_of_no_metric(self, manifest: Manifest) -> None:
        try:
            metric_of(manifest, self._best)
        except ValueError as error:
            self._best = None  # said once is enough
            message = f"{self.url}: no commit is kept as one of the best: {error}"
            self.events.emit("no_metric", message, level=logging.WARNING, reason=str(error))

    def _collect_leftovers(self, generation: int) -> None:
        """Delete what earlier generations began to write and never completed, and no reader holds.

        As retention keeps the newest commit, a generation with acknowledged commits can only be without any
        if a later one has some. Where none has, a manifest was lost, and the files are left to the user.
        """
        commits = root.commits(self.storage)
        complete = {commit for commit in commits if root.may_be_complete(self.storage, commit)}
        newest = max((commit.generation for commit in complete), default=0)
        for commit in commits:
            if commit in complete or commit.generation >= generation:  # that is being written by a later job
                continue
            try:
                self._collect_leftover(commit, lost=commit.generation > newest)
            except StorageError as error:
                self._not_deleted(error)

    def _collect_leftover(self, commit: CommitId, *, lost: bool) -> None:
        if root.is_quarantined(self.storage, commit):
            return
        if lost and self._is_acknowledged(commit.generation):
            root.quarantine(self.storage, commit, root.MANIFEST_GONE, self.clock)
        elif delete_unless_read(self.storage, commit, self.clock):
            message = f"{self.url}: removed {commit}, which was never completed"
            self.events.emit("leftover", message, level=logging.WARNING, commit=commit.name)

    def _is_acknowledged(self, generation: int) -> bool:
        return generation in self.claims.generations() and self.claims.read(generation).acknowledged

    def _not_deleted(self, error: Exception) -> None:
        what = str(error) if isinstance(error, StorageError) else f"{self.url}: could not delete: {error!r}"
        self.events.emit("not_deleted", what, level=logging.WARNING, error=what)


def check_is_ours(storage: Storage) -> None:
    """Make sure that a root is empty or a checkpoint root.

    Raises:
        ForeignRootError: it holds files of another kind.
        StorageError: it can't be read.
    """
    names = set(storage.names()) - _OF_THE_FILE_SYSTEM - {root.CLAIMS, root.READERS}
    claimed = storage.names(root.CLAIMS)
    foreign = {name for name in names if CommitId.parse(name) is None and not name.startswith(TEMPORARY)}
    foreign |= {f"{root.CLAIMS}/{name}" for name in claimed}
    foreign |= {f"{root.READERS}/{name}" for name in leases.foreign(storage)}
    if foreign and not claims.among(claimed):
        raise ForeignRootError(
            storage.url,
            f"this folder holds files that hvdrecover did not write (such as '{min(foreign)}'), and was "
            "left untouched. Name an empty or a new folder as the checkpoint root.",
        )
