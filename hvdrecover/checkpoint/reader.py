"""Reading durable commits: verify every byte, and walk back over broken commits.

Reading needs only the root's `Storage`. A job that resumes from the root calls `load_newest`, which also
marks the broken commits that it found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from hvdrecover.checkpoint import layout, root
from hvdrecover.checkpoint.arena import Arena, Bytes, allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FileEntry
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage.interface import ReadBytes, Storage, retrying
from hvdrecover.checkpoint.store import Store
from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompleteCommitError,
    NoUsableCommitError,
    StorageError,
)

Skipped = Callable[[CommitId, str, CheckpointError | None], None]
"""Called for each skipped commit: its identity, the reason, and the error; None if it was never completed."""
Load = Callable[[Storage, str, int], tuple[Bytes, ReadBytes]]
_FAILED = "the job has failed right after it was loaded, more than once in the same way"
_LOST = "its commits are gone from the root"
_NEVER_COMPLETED = "it has no manifest, so it was never completed, or is being deleted"


def copied(storage: Storage, path: str, size: int) -> tuple[Bytes, ReadBytes]:
    """Read a file into new memory."""
    buffer = allocate(size)
    return buffer, storage.read_into(path, buffer)


def read_commit(
    storage: Storage, commit: CommitId, only: Collection[str] | None = None, load: Load = copied
) -> Snapshot:
    """Read one commit, and verify every byte that is read.

    Args:
        only: the attributes of the state whose tensors to read, such as ``{"model"}``; None reads all.
            `Snapshot.state` is complete in any case.
        load: reads a file, given the storage, the path and the size; returns the bytes and their digest.

    Raises:
        IncompleteCommitError: the commit has no manifest, or was deleted while it was being read.
    """
    try:
        manifest = root.read_manifest(storage, commit)
        arenas = {
            name: _read_file(storage, commit, entry, load)
            for name, entry in manifest.by_attribute.items()
            if only is None or name in only
        }
    except (CorruptCheckpointError, StorageError) as error:
        if isinstance(error, IncompleteCommitError) or root.may_be_complete(storage, commit):
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
    """Read the newest commit that verifies; None if none was ever completed.

    If the storage fails, the call is retried for some seconds. If the root answers and one commit still
    cannot be read, that commit is skipped like a broken one.

    Args:
        order: takes the commits, newest first, and returns them in the order in which to try them.

    Raises:
        NoUsableCommitError: the root holds commits, and none of them verifies.
        FormatVersionError: a newer hvdrecover wrote the newest commit.
    """
    again = retrying(clock)
    reasons: dict[str, str] = {}
    unread: StorageError | None = None
    for commit in order(again(root.commits, storage)):
        try:
            return again(read_commit, storage, commit, only, load)
        except IncompleteCommitError:
            marked = again(root.is_quarantined, storage, commit)
            skipped(commit, root.MANIFEST_GONE if marked else _NEVER_COMPLETED, None)
        except CorruptCheckpointError as error:
            reason = reasons[commit.name] = root.reason(storage, commit, error)
            skipped(commit, reason, error)
        except StorageError as error:
            storage.names()  # raises if the whole root is unreachable: then older commits are, too
            unread = unread or error
            skipped(commit, root.reason(storage, commit, error), error)
    if unread is not None:
        raise unread
    if reasons:
        raise NoUsableCommitError(storage.url, reasons)
    return None


def load_newest(store: Store, suspects: Collection[tuple[str, str]] = ()) -> Snapshot | None:
    """Read the newest commit that verifies, for a job that resumes from it; None if the root never held one.

    Each broken commit on the way is marked as quarantined, and one log line says why. Commits that were
    marked earlier are verified again: if the user has repaired one, its mark is removed. A commit that the
    storage fails to deliver is skipped, but not marked.

    Args:
        suspects: commits after which the job has failed, as ranges: the names of the first and the last
            commit of each. They are tried last, the oldest of them first: even a suspect commit is better
            than a start from the beginning.
    """

    def say(name: str, reason: str, line: str) -> None:
        message = f"{store.url}: {line}: {reason}"
        store.events.emit("skipped", message, level=logging.WARNING, commit=name, reason=reason)

    def skipped(commit: CommitId, reason: str, error: CheckpointError | None) -> None:
        say(commit.name, reason, f"skipping {commit}")
        if isinstance(error, CorruptCheckpointError):
            try:
                root.quarantine(store.storage, commit, reason, store.clock)
            except StorageError as failure:
                store.events.emit("write_failed", str(failure), level=logging.WARNING, commit=commit.name)

    def without_suspects(commits: list[CommitId]) -> list[CommitId]:
        last = [each for each in commits if each.is_within(suspects)]
        for commit in last:
            say(commit.name, _FAILED, f"passing over {commit}, which is suspect")
        return [commit for commit in commits if commit not in last] + last[::-1]

    snapshot = read_newest(store.storage, skipped, clock=store.clock, order=without_suspects)
    since = 0 if snapshot is None else snapshot.id.generation
    found = root.commits(store.storage)
    there = {commit.generation for commit in found if root.may_be_complete(store.storage, commit)}
    lost = [
        f"generation {number}"
        for number in store.claims.generations()
        if number > since and number not in there and store.claims.read(number).acknowledged
    ]
    if snapshot is None:
        if lost:
            raise NoUsableCommitError(store.url, dict.fromkeys(lost, _LOST))
        return None
    store.storage.remove(root.quarantine_path(snapshot.id))
    store.resumed = snapshot.id
    for name in lost:
        say(name, _LOST, f"going back to {snapshot.id}, because of {name}")
    return snapshot


def _read_file(storage: Storage, commit: CommitId, entry: FileEntry, load: Load) -> Arena:
    path = f"{commit.name}/{entry.name}"
    url = f"{storage.url}/{path}"
    size = entry.size
    root.check_size(storage, commit, entry)
    try:
        try:
            buffer, found = load(storage, path, size)
        except StorageError:
            raise
        except (OSError, OverflowError, MemoryError) as error:
            raise StorageError(url, f"there is no memory for its {size} bytes ({error})") from error
        if found != ReadBytes(size, entry.digest):
            raise CorruptCheckpointError(url, "the file's content does not match the manifest's digest")
        header = buffer[: layout.header_size(buffer[:8].tobytes(), size)].tobytes()
        return Arena(layout.parse(header, size), buffer)
    except ValueError as error:
        raise CorruptCheckpointError(url, str(error)) from error
