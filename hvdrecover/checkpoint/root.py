"""A checkpoint root: its layout, and how a commit is read from it.

::

    ROOT/
      claims/g0003.json       who writes generation 3; see `hvdrecover.checkpoint.claims`
      readers/                leases that versions before 0.2 wrote for readers; ignored
      g0003-c00000120/        commit 120, made in generation 3
        model.safetensors     one file per attribute of the state that holds tensors
        MANIFEST.json         written last
        QUARANTINE.json       only if the commit was found broken: when and why

A reader verifies every byte that it reads, and walks back over broken commits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import Arena, Bytes, Layout, allocate, header_size, parse
from hvdrecover.checkpoint.manifest import FileEntry, Manifest, Snapshot
from hvdrecover.checkpoint.storage import ReadBytes, Storage, retried
from hvdrecover.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCommitError,
    NoUsableCommitError,
    StorageError,
)
from hvdrecover.machine import SYSTEM_CLOCK, Clock

CLAIMS = "claims"
READERS = "readers"
QUARANTINE = "QUARANTINE.json"
MANIFEST_GONE = "its manifest is gone"  # the reason for quarantine if all other files are there
_MAX_NOTE = 1 << 16  # bytes; a larger file is not one of our notes, and might not fit into memory


def commits(storage: Storage) -> list[CommitId]:
    """Return all commits that have a folder, newest first, also incomplete and broken ones."""
    found = (CommitId.parse(name) for name in storage.names())
    return sorted((commit for commit in found if commit is not None), reverse=True)


def manifest_path(commit: CommitId) -> str:
    return f"{commit.name}/{manifests.FILE_NAME}"


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
    """Read and verify a commit's manifest, but not the files of its tensors."""
    path = manifest_path(commit)
    url = f"{storage.url}/{path}"
    size = storage.size(path)
    if size is None:
        raise IncompleteCommitError(url, "the file is missing")
    if size > manifests.MAX_BYTES:
        raise CorruptCheckpointError(url, f"the file has {size} bytes, more than any manifest")
    return manifests.loads(storage.read(path), url, commit)


# -- reading commits ---------------------------------------------------------------------------------

Skipped = Callable[[CommitId, str, CheckpointError | None], None]
"""Called for each skipped commit: its identity, the reason, and the error; None if it was never completed."""
Load = Callable[[Storage, str, int], tuple[Bytes, ReadBytes]]
_NEVER_COMPLETED = "it has no manifest, so it was never completed, or is being deleted"


def copied(storage: Storage, path: str, size: int) -> tuple[Bytes, ReadBytes]:
    """Read a file into new memory."""
    buffer = allocate(size)
    return buffer, storage.read_into(path, buffer)


def read_layout(storage: Storage, commit: CommitId, entry: FileEntry) -> Layout:
    """Read the header of a data file. The tensors are not read, so the digest is not checked."""

    def head(count: int) -> bytes:
        buffer = allocate(count)
        return buffer[: storage.read_into(f"{commit.name}/{entry.name}", buffer).size].tobytes()

    with _checked(storage, commit, entry):
        return parse(head(header_size(head(min(8, entry.size)), entry.size)), entry.size)


def read_commit(
    storage: Storage, commit: CommitId, only: Collection[str] | None = None, load: Load = copied
) -> Snapshot:
    """Read and verify one commit; ``only`` limits the attributes whose tensors are read."""
    try:
        manifest = read_manifest(storage, commit)
        arenas = {
            name: _read_file(storage, commit, entry, load)
            for name, entry in manifest.by_attribute.items()
            if only is None or name in only
        }
    except (CorruptCheckpointError, StorageError) as error:
        if isinstance(error, IncompleteCommitError) or may_be_complete(storage, commit):
            raise
        url = f"{storage.url}/{commit.name}"
        raise IncompleteCommitError(url, "the commit was deleted while it was being read") from error
    return Snapshot.of(manifest, arenas)


def read_newest(
    storage: Storage,
    skipped: Skipped,
    only: Collection[str] | None = None,
    clock: Clock = SYSTEM_CLOCK,
    order: Callable[[list[CommitId]], list[CommitId]] = lambda commits: commits,
    load: Load = copied,
) -> Snapshot | None:
    """Read the newest commit that verifies, in the given order of attempts; None if there was none."""
    reasons: dict[str, str] = {}
    unread: StorageError | None = None
    for commit in order(retried(clock, commits, storage)):
        try:
            return retried(clock, read_commit, storage, commit, only, load)
        except IncompleteCommitError:
            marked = retried(clock, is_quarantined, storage, commit)
            skipped(commit, MANIFEST_GONE if marked else _NEVER_COMPLETED, None)
        except CorruptCheckpointError as error:
            reasons[commit.name] = reason(storage, commit, error)
            skipped(commit, reasons[commit.name], error)
        except StorageError as error:
            # If the root answers, a commit that cannot be read is skipped like a broken one.
            storage.names()  # raises if the whole root is unreachable: then older commits are, too
            unread = unread or error
            skipped(commit, reason(storage, commit, error), error)
    if unread is not None:
        raise unread
    if reasons:
        raise NoUsableCommitError(storage.url, reasons)
    return None


def _read_file(storage: Storage, commit: CommitId, entry: FileEntry, load: Load) -> Arena:
    with _checked(storage, commit, entry) as path:
        try:
            buffer, found = load(storage, path, entry.size)
        except StorageError:
            raise
        except (OSError, OverflowError, MemoryError) as error:
            reason = f"there is no memory for its {entry.size} bytes ({error})"
            raise StorageError(f"{storage.url}/{path}", reason) from error
        if found != ReadBytes(entry.size, entry.digest):
            raise ValueError("the file's content does not match the manifest's digest")
        return Arena.of_file(buffer)


@contextmanager
def _checked(storage: Storage, commit: CommitId, entry: FileEntry) -> Iterator[str]:
    """Check a data file's size and give its path. Any ValueError means that the file is broken."""
    path = f"{commit.name}/{entry.name}"
    try:
        size = storage.size(path)
        if size is None:
            raise ValueError("the file is missing")
        if size != entry.size:
            raise ValueError(f"the file has {size} bytes, and the manifest says {entry.size}")
        yield path
    except ValueError as error:
        raise CorruptCheckpointError(f"{storage.url}/{path}", str(error)) from error
