"""The choice of commits that may be deleted, and their deletion.

Two kinds of commits go: complete ones that the user's rules do not keep, and those that killed processes left
incomplete. Only one process at a time may prune a root: the job that owns it. A reader whose commit is
deleted while it reads gets an `IncompleteCommitError`, because the manifest is deleted first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from hvdrecover.checkpoint import claims, root, values
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.settings import Best, Keep
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.clock import Clock
from hvdrecover.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
)


@dataclass(frozen=True)
class Facts:
    """The facts about a commit that the choice depends on.

    Attributes:
        time: when it was written, in seconds since the Unix epoch.
        metric: what `Keep.best` goes by; None if the commit has none.
    """

    commit: CommitId
    time: float
    metric: float | None = None


def expired(commits: Iterable[Facts], keep: Keep, now: float) -> list[CommitId]:
    """Return the commits that may be deleted, oldest first; never the newest.

    A job that passes over commits continues from an older one, in a later generation. Until it has made a
    commit of a higher number, those that it passed over may be all that holds this progress: they stay, and
    don't count.

    Args:
        commits: the good commits of a root, in any order: broken ones are neither deleted nor counted.
    """
    ordered = sorted(commits, key=lambda facts: facts.commit)
    good = [facts for facts in ordered if facts.commit.commit <= ordered[-1].commit.commit]
    kept = {facts.commit for facts in good[-keep.last :]}
    if keep.period is not None:
        kept |= _first_of_each_run(good, keep.period)
    if keep.within is not None:
        kept |= {facts.commit for facts in good if now - facts.time < keep.within}
    if keep.best is not None:
        kept |= _best(good, keep.best)
    return [facts.commit for facts in good if facts.commit not in kept]


def metric_of(manifest: Manifest, best: Best | None) -> float | None:
    """The number that `Keep.best` goes by in one commit; None if it has none, or one that is not finite.

    Raises:
        ValueError: the state has no such attribute, or it is not a number.
    """
    if best is None:
        return None
    if best.metric not in manifest.attributes:
        raise ValueError(f"the state has no attribute '{best.metric}'")
    value = manifest.attributes[best.metric]
    with suppress(ValueError):  # such as a tensor
        value = values.decode(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ValueError(f"state.{best.metric} is not a number; make it one with float()")
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _first_of_each_run(good: Sequence[Facts], every: int) -> set[CommitId]:
    first: dict[int, CommitId] = {}
    for facts in good:
        first.setdefault(facts.commit.commit // every, facts.commit)
    return set(first.values())


def _best(good: Sequence[Facts], best: Best) -> set[CommitId]:
    # Commits of one value share one measurement, and the first of them is what was measured.
    first: dict[float, CommitId] = {}
    for facts in good:
        if facts.metric is not None and math.isfinite(facts.metric):
            first.setdefault(facts.metric, facts.commit)
    ranked = sorted(first, reverse=best.mode == "max")
    return {first[value] for value in ranked[: best.count]}


class Pruner:
    """Retention at one root.

    Each manifest is read once, as there may be hundreds. The job notes the commits that it makes.
    """

    def __init__(self, storage: Storage, keep: Keep, clock: Clock) -> None:
        self._storage = storage
        self._keep = keep
        self._clock = clock
        self._facts: dict[CommitId, Facts | None] = {}  # None for a broken commit, which is left to the user

    def note(self, manifest: Manifest) -> None:
        """Take a commit into account that has just been made durable."""
        try:
            metric = metric_of(manifest, self._keep.best)
        except ValueError:
            metric = None
        self._facts[manifest.id] = Facts(manifest.id, manifest.time, metric)

    @property
    def known(self) -> set[CommitId]:
        """The good commits that there were when last looked."""
        return {commit for commit, facts in self._facts.items() if facts is not None}

    def expired(self, *, more: int = 0) -> list[CommitId]:
        """Return the commits that may be deleted, oldest first.

        Args:
            more: how many more of the newest to keep than the user asks for.

        Raises:
            StorageError: the root cannot be listed.
        """
        there = root.commits(self._storage)
        self._facts = {commit: facts for commit, facts in self._facts.items() if commit in there}
        for commit in there:
            if commit not in self._facts:
                # One that cannot be read must not fill the disk with all others.
                with suppress(StorageError, IncompleteCommitError):
                    self._look_at(commit)
        good = [facts for facts in self._facts.values() if facts is not None]
        keep = replace(self._keep, last=self._keep.last + more)
        return expired(good, keep, self._clock.now())

    def prune(self, allowed: Callable[[], None], *, more: int = 0, resumed: CommitId | None = None) -> None:
        """Delete the commits that have expired.

        Args:
            allowed: called before each deletion; may raise.
            resumed: the commit that the job continues from, if it has made none since. It stays, and so do
                later ones, which were passed over.

        Raises:
            StorageError: a commit could not be deleted. Earlier deletions stand; a next call tries the rest.
        """
        for commit in self.expired(more=more):
            if resumed is None or commit < resumed:
                allowed()
                if not root.is_quarantined(self._storage, commit):  # since it was looked at
                    delete_commit(self._storage, commit)
                del self._facts[commit]

    def _look_at(self, commit: CommitId) -> None:
        if root.is_quarantined(self._storage, commit):
            self._facts[commit] = None
            return
        try:
            self.note(root.read_manifest(self._storage, commit))
        except IncompleteCommitError:
            raise
        except (CorruptCheckpointError, FormatVersionError):
            self._facts[commit] = None  # a reader quarantines it, or a newer hvdrecover reads it


def delete_commit(storage: Storage, commit: CommitId) -> None:
    """Delete a commit, or the folder of one that was never completed.

    The manifest goes first: a process that is killed at any step leaves a whole commit or an incomplete one.
    """
    storage.remove(root.manifest_path(commit))
    storage.delete(commit.name)


def incomplete(
    storage: Storage, before: int, complete: Collection[CommitId] = ()
) -> tuple[list[CommitId], list[CommitId]]:
    """Return the commits of earlier generations that were never completed, newest first.

    They cannot be completed any more, since their writer looks at the claims before it publishes. As
    retention keeps the newest commit, a generation with acknowledged commits is only without any if a later
    one has some. Where none has, a manifest was lost.

    Args:
        before: the generation that is being written.
        complete: commits that are known to be complete.

    Returns:
        Those that were never completed; and those whose manifest was lost, and that are not marked yet.
    """
    commits = root.commits(storage)
    there = {each for each in commits if each in complete or root.may_be_complete(storage, each)}
    newest = max((commit.generation for commit in there), default=0)
    begun: list[CommitId] = []
    lost: list[CommitId] = []
    for commit in commits:
        if commit not in there and commit.generation < before and not _is_marked(storage, commit):
            is_lost = commit.generation > newest and _is_acknowledged(storage, commit.generation)
            (lost if is_lost else begun).append(commit)
    return begun, lost


def is_of_before(folder: str, generation: int) -> bool:
    """Return whether temporary files of this folder are of an earlier generation, or of no commit."""
    commit = CommitId.parse(folder)
    return commit is None or commit.generation < generation


def _is_marked(storage: Storage, commit: CommitId) -> bool:
    try:
        return root.is_quarantined(storage, commit)
    except StorageError:
        return True


def _is_acknowledged(storage: Storage, generation: int) -> bool:
    claimed = claims.among(storage.names(root.CLAIMS))
    return generation in claimed and claims.read(storage, generation).acknowledged
