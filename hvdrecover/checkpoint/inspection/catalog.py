"""The commits of a root, and the contents of one of them, without reading tensors.

A commit that is listed as complete may still have a damaged data file; `inspection.verify` finds that out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import FileEntry, Manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.checkpoint.values import Json
from hvdrecover.errors import (
    CorruptCheckpointError,
    FormatVersionError,
    IncompleteCommitError,
    StorageError,
    UnknownCommitError,
)
from hvdrecover.redaction import redact

State = Literal["complete", "finished", "quarantined", "incomplete", "broken", "newer format"]

WHOLE = ("complete", "finished")  # states from which a job can resume


@dataclass(frozen=True)
class Entry:
    """One commit of a root.

    Attributes:
        id: the commit.
        state: ``complete``; ``finished``, if the run ended there; ``quarantined``, if a job found it broken;
            ``incomplete``, if it has no manifest, since it is being written or its writer was killed;
            ``broken``, if its manifest cannot be read; ``newer format``.
        reason: why it is quarantined, broken or of a newer format; else None.
        nbytes: the size of its files, manifest included, in bytes.
        manifest: the manifest; None if it is missing or cannot be read.
    """

    id: CommitId
    state: State
    reason: str | None
    nbytes: int
    manifest: Manifest | None

    @property
    def is_whole(self) -> bool:
        """Return whether a job can resume from it, as far as its manifest shows."""
        return self.state in WHOLE


def commits(storage: Storage) -> list[CommitId]:
    """Return the commits of a root, newest first; none if a job has just begun.

    Raises:
        UnknownCommitError: this is not a checkpoint root.
        StorageError: the storage failed.
    """
    if found := root.commits(storage):
        return found
    names = storage.names()
    if root.CLAIMS in names:
        return []
    if not names:
        problem = "there is no checkpoint root here: the folder does not exist, or is empty. Check the URL"
    elif manifests.FILE_NAME in names:
        problem = "this is one commit of a checkpoint root; name the folder above it, and the commit after it"
    else:
        problem = f"this is not a checkpoint root: it holds no commits, but '{names[0]}'. Check the URL"
    raise UnknownCommitError(storage.url, problem, [])


def entries(storage: Storage) -> list[Entry]:
    """Return the commits of a root with their facts, newest first; skip those that are deleted meanwhile.

    Raises:
        UnknownCommitError: this is not a checkpoint root.
        StorageError: the storage failed.
    """
    return [each for commit in commits(storage) if (each := entry(storage, commit)) is not None]


def find(storage: Storage, wanted: str | None) -> CommitId:
    """Return the commit that a user names.

    Args:
        storage: the root.
        wanted: a commit's name, such as ``g0003-c00000120``, or its number alone, such as ``120``; None for
            the newest complete commit.

    Raises:
        UnknownCommitError: no commit matches, or several have this number.
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
    names = [commit.name for commit in matches or found]
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    if matches:
        problem = f"several commits have the number {wanted}: {shown}. Give the whole name"
    else:
        problem = f"it holds no commit '{redact(wanted)}'; it holds {shown or 'none at all yet'}"
    raise UnknownCommitError(storage.url, problem, names)


def entry(storage: Storage, commit: CommitId) -> Entry | None:
    """Return the facts of one commit; None if it has no folder.

    Raises:
        StorageError: the storage failed.
    """
    try:
        names = storage.names(commit.name)
        nbytes = sum(storage.size(f"{commit.name}/{name}") or 0 for name in names)
        state, reason, manifest = _judge(storage, commit, names)
    except StorageError:
        if not root.is_complete(storage, commit):
            return None  # deleted meanwhile
        raise
    return Entry(commit, state, reason, nbytes, manifest) if names else None


def _judge(
    storage: Storage, commit: CommitId, names: Sequence[str]
) -> tuple[State, str | None, Manifest | None]:
    try:
        manifest = root.read_manifest(storage, commit)
    except IncompleteCommitError:
        return "incomplete", None, None
    except CorruptCheckpointError as error:
        return "broken", root.reason(storage, commit, error), None
    except FormatVersionError as error:
        return "newer format", root.reason(storage, commit, error), None
    if root.QUARANTINE in names:
        return "quarantined", _note(storage, root.quarantine_path(commit)), manifest
    return "finished" if manifest.finished else "complete", None, manifest


def _note(storage: Storage, path: str) -> str:
    try:
        note: Any = json.loads(root.read_note(storage, path))
        return str(note["reason"])
    except (ValueError, KeyError, TypeError, RecursionError, StorageError):
        return "the note with the reason cannot be read"


@dataclass(frozen=True)
class Contents:
    """The contents of one commit.

    Attributes:
        entry: its facts.
        manifest: its manifest.
        layouts: file name to the tensors in it.
        attributes: the structure of each attribute but the samplers; see the function `attributes`.
        samplers: the cursor of each sampler, by attribute name.
    """

    entry: Entry
    manifest: Manifest
    layouts: dict[str, Layout]
    attributes: dict[str, Json]
    samplers: dict[str, Json]


def look_into(storage: Storage, commit: CommitId) -> Contents:
    """Read a commit's manifest and the headers of its files, and check no digest of a file.

    Raises:
        CorruptCheckpointError: the manifest, a file's size or a header is wrong.
        FormatVersionError: it is of a newer format.
        StorageError: the storage failed.
    """
    manifest, url = root.read_manifest(storage, commit), f"{storage.url}/{commit.name}"
    facts = entry(storage, commit)
    if facts is None:
        raise CorruptCheckpointError(url, "it has just been deleted")
    return Contents(
        entry=facts,
        manifest=manifest,
        layouts={file.name: layout_of(storage, commit, file) for file in manifest.files},
        attributes=attributes(manifest.state, url),
        samplers=samplers(manifest.state, url),
    )


def attributes(state: Mapping[str, Json], url: str) -> dict[str, Json]:
    """Return the structure of each attribute but the samplers: containers, plain values, names of tensors.

    Args:
        state: `hvdrecover.checkpoint.manifest.Manifest.state`.
        url: the commit, for errors.

    Raises:
        CorruptCheckpointError: it is malformed.
    """
    return _part(state, "attributes", url)


def samplers(state: Mapping[str, Json], url: str) -> dict[str, Json]:
    """Return the cursor of each sampler, by attribute name; see `attributes`."""
    return _part(state, "samplers", url)


def _part(state: Mapping[str, Json], name: str, url: str) -> dict[str, Json]:
    part = state.get(name, {})
    if not isinstance(part, dict):
        raise CorruptCheckpointError(url, f"the {name} in its manifest are not a JSON object")
    return part


def layout_of(storage: Storage, commit: CommitId, file: FileEntry) -> Layout:
    """Read a data file's header only, and do not check its digest.

    Raises:
        CorruptCheckpointError: the file is missing, has another size, or its header is malformed.
        StorageError: the storage failed.
    """
    path = f"{commit.name}/{file.name}"
    root.check_size(storage, commit, file)
    try:
        return root.read_layout(storage, path, file.size)
    except ValueError as error:
        raise CorruptCheckpointError(f"{storage.url}/{path}", str(error)) from error
