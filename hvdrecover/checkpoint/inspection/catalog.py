"""The commits that a root holds, and finding one by its name.

Only manifests are read here, so a commit that is listed as complete may still have a damaged data file;
`hvdrecover.checkpoint.inspection.verify` finds that out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.root import read_manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
    UnknownCommitError,
)
from hvdrecover.redaction import redact

State = Literal["complete", "finished", "quarantined", "suspect", "incomplete", "broken", "newer format"]

WHOLE = ("complete", "finished", "suspect")  # states from which a job can resume


@dataclass(frozen=True)
class Entry:
    """One commit of a root.

    Attributes:
        id: the commit.
        state: ``complete``; ``finished``, if the run had come to its end there; ``quarantined``, if a job
            found it broken; ``suspect``, if a job has failed right after it was loaded; ``incomplete``, if it
            has no manifest, because it is being written or its writer was killed; ``broken``, if its manifest
            can't be read; ``newer format``.
        reason: why it is quarantined, suspect, broken or of a newer format; else None.
        nbytes: the size of its files, manifest included, in bytes.
        manifest: None if there is none that can be read.
    """

    id: CommitId
    state: State
    reason: str | None
    nbytes: int
    manifest: Manifest | None

    @property
    def is_whole(self) -> bool:
        """Return whether a job can resume from it, as far as can be told without reading its tensors."""
        return self.state in WHOLE


def commits(storage: Storage) -> list[CommitId]:
    """The commits of a root, newest first; none if a job has just begun.

    Raises:
        UnknownCommitError: this is not a checkpoint root.
        StorageError: the storage failed.
    """
    found = root.commits(storage)
    if not found:
        _check_is_root(storage)
    return found


def entries(storage: Storage) -> list[Entry]:
    """The commits of a root and what can be said of each without reading its tensors, newest first.

    A commit that is deleted meanwhile is left out.

    Raises:
        UnknownCommitError: this is not a checkpoint root.
        StorageError: the storage failed.
    """
    found = (entry(storage, commit) for commit in commits(storage))
    return [each for each in found if each is not None]


def find(storage: Storage, wanted: str | None) -> CommitId:
    """The commit that a user means.

    Args:
        storage: the root.
        wanted: a commit's name, such as ``g0003-c00000120``, or its number alone, such as ``120``; None for
            the newest complete commit.

    Raises:
        UnknownCommitError: there is none, or there are several of this number.
    """
    found = commits(storage)
    if wanted is None:
        for commit in found:
            if root.is_complete(storage, commit):
                return commit
        raise UnknownCommitError(storage.url, "it holds no complete commit yet", [])
    by_name = [commit for commit in found if commit.name == wanted]
    matches = by_name or [commit for commit in found if wanted.isascii() and wanted == str(commit.commit)]
    if len(matches) == 1:
        return matches[0]
    shown, names = redact(wanted), [commit.name for commit in matches or found]
    if matches:
        problem = f"several commits have the number {shown}: {', '.join(names)}. Give the whole name"
    else:
        problem = f"it holds no commit '{shown}'; {_choice(names)}"
    raise UnknownCommitError(storage.url, problem, names)


def entry(storage: Storage, commit: CommitId) -> Entry | None:
    """Return what can be said of one commit without reading its tensors; None if it has no folder.

    Raises:
        StorageError: the storage failed.
    """
    try:
        names = storage.names(commit.name)
        if not names:
            return None
        sizes = [storage.size(f"{commit.name}/{name}") or 0 for name in names]
        if manifests.FILE_NAME not in names:
            return Entry(commit, "incomplete", None, sum(sizes), None)
        state, reason, manifest = _judge(storage, commit, names)
    except StorageError:
        if not root.is_complete(storage, commit):
            return None  # deleted meanwhile
        raise
    return Entry(commit, state, reason, sum(sizes), manifest)


def _judge(
    storage: Storage, commit: CommitId, names: Sequence[str]
) -> tuple[State, str | None, Manifest | None]:
    try:
        manifest = read_manifest(storage, commit)
    except IncompleteCommitError:
        return "incomplete", None, None  # it has just been deleted, or is about to be
    except CorruptCheckpointError as error:
        return "broken", root.reason(storage, commit, error), None
    except FormatVersionError as error:
        return "newer format", root.reason(storage, commit, error), None
    if root.QUARANTINE in names:
        return "quarantined", _why(storage, root.quarantine_path(commit)), manifest
    if root.SUSPECT in names:
        return "suspect", _why(storage, f"{commit.name}/{root.SUSPECT}"), manifest
    return "finished" if manifest.finished else "complete", None, manifest


def _why(storage: Storage, note_path: str) -> str:
    try:
        note: Any = json.loads(root.read_note(storage, note_path))
        return str(note["reason"])
    except (ValueError, KeyError, TypeError, RecursionError, StorageError):
        return "the note that says why can't be read"


def _check_is_root(storage: Storage) -> None:
    names = storage.names()
    if root.CLAIMS in names:
        return
    if not names:
        problem = "there is no checkpoint root here: the folder does not exist, or is empty. Check the URL"
    elif manifests.FILE_NAME in names:
        problem = "this is one commit of a checkpoint root; name the folder above it, and the commit after it"
    else:
        problem = f"this is not a checkpoint root: it holds no commits, but '{names[0]}'. Check the URL"
    raise UnknownCommitError(storage.url, problem, [])


def _choice(names: Sequence[str]) -> str:
    if not names:
        return "it holds none at all yet"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"it holds {', '.join(names[:5])}{more}"
