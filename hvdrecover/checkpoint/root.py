"""The layout of a checkpoint root.

::

    ROOT/
      claims/g0003.json       who writes generation 3; see `hvdrecover.checkpoint.claims`
      readers/                leases that versions before 0.2 wrote for readers; ignored
      g0003-c00000120/        commit 120, made in generation 3
        model.safetensors     one file per attribute of the state that holds tensors
        MANIFEST.json         written last
        QUARANTINE.json       only if the commit was found broken: when and why
"""

from __future__ import annotations

import json

from hvdrecover.checkpoint import layout as layouts
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import Layout
from hvdrecover.checkpoint.manifest import FileEntry, Manifest
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.clock import Clock
from hvdrecover.errors import CorruptCheckpointError, IncompleteCommitError, StorageError

CLAIMS = "claims"
READERS = "readers"
QUARANTINE = "QUARANTINE.json"
_MAX_NOTE = 1 << 16  # bytes; a larger file is not one of our notes, and might not fit into memory
MANIFEST_GONE = "its manifest is gone"  # the reason for quarantine if all other files are there


def commits(storage: Storage) -> list[CommitId]:
    """Return all commits that have a folder, newest first, also incomplete and broken ones."""
    found = (CommitId.parse(name) for name in storage.names())
    return sorted((commit for commit in found if commit is not None), reverse=True)


def manifest_path(commit: CommitId) -> str:
    return f"{commit.name}/{manifests.FILE_NAME}"


def check_size(storage: Storage, commit: CommitId, entry: FileEntry) -> None:
    """Raise `CorruptCheckpointError` if a data file is missing or has another size than in the manifest."""
    path = f"{commit.name}/{entry.name}"
    size = storage.size(path)
    if size is None:
        raise CorruptCheckpointError(f"{storage.url}/{path}", "the file is missing")
    if size != entry.size:
        reason = f"the file has {size} bytes, and the manifest says {entry.size}"
        raise CorruptCheckpointError(f"{storage.url}/{path}", reason)


def read_layout(storage: Storage, commit: CommitId, entry: FileEntry) -> Layout:
    """Read the header of a data file. The tensors are not read, so the digest is not checked."""
    check_size(storage, commit, entry)
    path = f"{commit.name}/{entry.name}"

    def head(count: int) -> bytes:
        buffer = allocate(count)
        return buffer[: storage.read_into(path, buffer).size].tobytes()

    try:
        return layouts.parse(head(layouts.header_size(head(min(8, entry.size)), entry.size)), entry.size)
    except ValueError as error:
        raise CorruptCheckpointError(f"{storage.url}/{path}", str(error)) from error


def quarantine_path(commit: CommitId) -> str:
    return f"{commit.name}/{QUARANTINE}"


def is_complete(storage: Storage, commit: CommitId) -> bool:
    """Return whether a commit has a manifest, valid or not."""
    return storage.size(manifest_path(commit)) is not None


def may_be_complete(storage: Storage, commit: CommitId) -> bool:
    """Return whether a commit may have a manifest: True also if the storage does not answer."""
    try:
        return is_complete(storage, commit)
    except StorageError:
        return True


def is_quarantined(storage: Storage, commit: CommitId) -> bool:
    return storage.size(quarantine_path(commit)) is not None


def quarantine(storage: Storage, commit: CommitId, reason: str, clock: Clock) -> None:
    """Mark a commit as broken, unless it is marked already. Nothing is deleted."""
    if not is_quarantined(storage, commit):
        note = json.dumps({"time": clock.now(), "reason": reason}).encode()
        storage.publish(quarantine_path(commit), note)


def read_note(storage: Storage, path: str) -> str:
    """Return the text of a claim or a mark; empty if the file is missing, or too large to be one."""
    size = storage.size(path)
    return "" if size is None or size > _MAX_NOTE else storage.read(path).decode()


def reason(storage: Storage, commit: CommitId, error: Exception) -> str:
    """Return an error's message without the commit's URL at its beginning."""
    return str(error).removeprefix(f"{storage.url}/{commit.name}/")


def read_manifest(storage: Storage, commit: CommitId) -> Manifest:
    """Read a commit's manifest: everything but its tensors. The tensors' files are not checked.

    Raises:
        IncompleteCommitError: the manifest is missing.
        CorruptCheckpointError: the manifest is truncated, altered or not valid JSON.
        FormatVersionError: a newer hvdrecover wrote the manifest, in a format that this one cannot read.
    """
    path = manifest_path(commit)
    url = f"{storage.url}/{path}"
    size = storage.size(path)
    if size is not None and size > manifests.MAX_BYTES:
        raise CorruptCheckpointError(url, f"the file has {size} bytes, more than any manifest")
    try:
        text = None if size is None else storage.read(path)
    except StorageError:
        if is_complete(storage, commit):
            raise
        text = None  # another process deleted the commit between the two calls
    if text is None:
        raise IncompleteCommitError(url, "the file is missing")
    return manifests.loads(text, url, commit)
