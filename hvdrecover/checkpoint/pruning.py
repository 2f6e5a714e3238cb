"""Deleting what retention no longer keeps, and never a commit that is being read.

One process at a time should prune a root: its job. See `hvdrecover.checkpoint.leases` for the order of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import replace

from hvdrecover.checkpoint import leases, root
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.retention import Facts, expired, metric_of
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.clock import Clock
from hvdrecover.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
)


class Pruner:
    """Retention at one root.

    Each commit is looked at once; those that this process makes have to be told of with `note`.

    Args:
        storage: the root.
        keep: what to keep.
        clock: where times come from.
    """

    def __init__(self, storage: Storage, keep: Keep, clock: Clock) -> None:
        self._storage = storage
        self._keep = keep
        self._clock = clock
        self._facts: dict[CommitId, Facts] = {}
        self._passed: set[CommitId] = set()  # commits that are not ours to judge

    def note(self, manifest: Manifest) -> None:
        """Take a commit into account that has just been made durable."""
        self._facts[manifest.id] = self._facts_of(manifest)

    @property
    def known(self) -> Set[CommitId]:
        """The good commits that there were when last looked."""
        return self._facts.keys()

    def expired(self, *, more: int = 0) -> list[CommitId]:
        """The commits that may be deleted, oldest first.

        Args:
            more: how many more of the newest to keep than the user asks for.

        Raises:
            StorageError: the root can't be listed.
        """
        self._look()
        keep = replace(self._keep, last=self._keep.last + more)
        return expired(self._facts.values(), keep, self._clock.now())

    def prune(
        self, allowed: Callable[[], None], *, more: int = 0, resumed: CommitId | None = None
    ) -> list[CommitId]:
        """Delete what has expired and is not being read.

        Args:
            allowed: called before each deletion; may raise.
            more: see `expired`.
            resumed: the commit that the job continues from, if it has made none since. It stays, and so do
                later ones, which were passed over.

        Returns:
            The deleted commits, oldest first.

        Raises:
            StorageError: something could not be deleted. What was deleted before that stays deleted, and
                the rest is tried again next time.
        """
        unwanted = [commit for commit in self.expired(more=more) if resumed is None or commit < resumed]
        if unwanted:
            leases.collect(self._storage, self._clock.now())
        deleted = []
        for commit in unwanted:
            allowed()
            if self._delete(commit):
                deleted.append(commit)
        return deleted

    def _delete(self, commit: CommitId) -> bool:
        if root.is_quarantined(self._storage, commit):  # since it was looked at
            del self._facts[commit]
            return False
        deleted = delete_unless_read(self._storage, commit, self._clock)
        if deleted:
            del self._facts[commit]
        return deleted

    def _look(self) -> None:
        there = root.commits(self._storage)
        for gone in self._facts.keys() - set(there):
            del self._facts[gone]
        for commit in there:
            if commit not in self._facts and commit not in self._passed:
                with suppress(StorageError):  # one that can't be read must not fill the disk with all others
                    self._look_at(commit)

    def _look_at(self, commit: CommitId) -> None:
        if not root.is_complete(self._storage, commit):
            return
        if root.is_quarantined(self._storage, commit):
            self._passed.add(commit)
            return
        try:
            self.note(root.read_manifest(self._storage, commit))
        except IncompleteCommitError:
            return  # it is being deleted
        except (CorruptCheckpointError, FormatVersionError):
            self._passed.add(commit)  # a reader quarantines it, or a newer hvdrecover reads it

    def _facts_of(self, manifest: Manifest) -> Facts:
        try:
            metric = metric_of(manifest, self._keep.best)
        except ValueError:
            metric = None
        return Facts(manifest.id, manifest.time, metric)


def delete_unless_read(storage: Storage, commit: CommitId, clock: Clock) -> bool:
    """Delete a commit, or an incomplete one's folder, unless somebody reads it.

    Killed at any step, this leaves a whole commit, or a folder without a manifest, which is none.

    Returns:
        Whether it was deleted.

    Raises:
        StorageError: the storage failed.
    """
    if leases.is_read(storage, commit, clock.now()):
        return False
    path = root.manifest_path(commit)
    text = root.manifest_text(storage, commit)
    storage.remove(path)
    if leases.is_read(storage, commit, clock.now()):
        if text is not None:
            storage.publish(path, text)
        return False
    storage.delete(commit.name)
    return True
