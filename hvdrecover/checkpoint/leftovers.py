"""Leftovers of killed processes at a root: commits that were begun and never completed, and files aside.

A commit of an earlier generation than the newest claim can't be completed any more, as its writer looks at
the claims before it publishes. So it may go, whether or not that process still lives. What is of the newest
claimed generation may be being written, and what is of a later one is none of this process's business.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hvdrecover.checkpoint import claims, root
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.storage import Storage, Temporary
from hvdrecover.errors import StorageError
from hvdrecover.process_identity import has_ended


def incomplete(
    storage: Storage, before: int, complete: Collection[CommitId] = ()
) -> tuple[list[CommitId], list[CommitId]]:
    """The commits of generations before this one that can't be completed any more, newest first.

    As retention keeps the newest commit, a generation with acknowledged commits can only be without any
    if a later one has some. Where none has, a manifest was lost.

    Args:
        storage: the root.
        before: the generation that is being written.
        complete: commits that are known to be complete.

    Returns:
        Those that were never completed; and those whose manifest was lost, and that are not marked yet.

    Raises:
        StorageError: the storage failed.
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
    """Return whether files that lie aside for this folder are of an earlier generation, or of no commit."""
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


@dataclass(frozen=True)
class Leftovers:
    """The things that lie at a root beside commits.

    Attributes:
        commits: those that were never completed and can't be any more, newest first.
        aside: the files that processes have left which have ended, or must not write any more.
        in_use: the other files that lie aside, which a job may be using.
    """

    commits: list[CommitId]
    aside: list[Temporary]
    in_use: list[Temporary]


def find(storage: Storage) -> Leftovers:
    """Return what nobody needs at a root, for somebody who writes none of it. Changes nothing.

    Raises:
        StorageError: the storage failed.
    """
    before = being_written(storage)
    commits, _ = incomplete(storage, before)
    try:
        temporaries = storage.temporaries()
    except StorageError:  # some stores let users read, and not look for uploads
        temporaries = []
    aside = [each for each in temporaries if is_of_before(each.folder, before)] if before else []
    return Leftovers(commits, aside, [each for each in temporaries if each not in aside])


def being_written(storage: Storage) -> int:
    """The generation that may be being written; 0 if nobody has claimed any. Of earlier ones, nothing is.

    Raises:
        StorageError: the storage failed.
    """
    owner = claims.owner(claims.deciding(storage, claims.among(storage.names(root.CLAIMS))))
    if owner is None:
        return 0
    # Whoever comes after a process that has ended claims a later one first.
    return owner.generation + 1 if has_ended(owner.process) else owner.generation
