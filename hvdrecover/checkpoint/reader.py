"""Reading durable commits: verify everything, walk back over what is broken."""

from __future__ import annotations

import json
import logging

from hvdrecover.checkpoint import layout
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.arena import Arena, allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FileEntry
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import ReadBytes
from hvdrecover.checkpoint.store import QUARANTINE, Store
from hvdrecover.errors import CorruptCheckpointError, NoUsableCommitError, StorageError

_LOST = "its commits are gone from the root"


def load_newest(store: Store) -> Snapshot | None:
    """Read the newest commit that verifies.

    Broken commits on the way are marked as quarantined, each with one line that says why. One that is marked
    is verified again: if it has been repaired, the mark is taken away.

    Returns:
        The commit, or None if the root has never held a durable one.

    Raises:
        NoUsableCommitError: the root has held durable commits, and none can be used.
        FormatVersionError: the newest commit is of a newer format.
        StorageError: the storage failed.
    """
    reasons: dict[str, str] = {}
    for commit in store.commits():
        if not store.is_complete(commit):
            _skip(store, commit, "it has no manifest, so it was never completed")
            continue
        try:
            snapshot = read_commit(store, commit)
        except CorruptCheckpointError as error:
            reasons[commit.name] = str(error).removeprefix(f"{store.url}/{commit.name}/")
            _quarantine(store, commit, reasons[commit.name])
            continue
        store.storage.remove(f"{commit.name}/{QUARANTINE}")
        _report_lost(store, commit)
        return snapshot
    if not reasons:
        reasons = {f"generation {generation}": _LOST for generation in _lost(store, 0)}
    if reasons:
        raise NoUsableCommitError(store.url, reasons)
    return None


def read_commit(store: Store, commit: CommitId) -> Snapshot:
    """Read one commit and verify every byte of it.

    Raises:
        CorruptCheckpointError: a file is missing, truncated, altered or nonsense.
        FormatVersionError: it was written in a newer format.
        StorageError: the storage failed.
    """
    url = f"{store.url}/{commit.name}"
    if not store.is_complete(commit):
        raise CorruptCheckpointError(f"{url}/{manifests.FILE_NAME}", "the file is missing")
    text = store.storage.read(f"{commit.name}/{manifests.FILE_NAME}")
    manifest = manifests.loads(text, f"{url}/{manifests.FILE_NAME}", commit)
    files = {entry.name.removesuffix(".safetensors"): entry for entry in manifest.files}
    return Snapshot(
        id=commit,
        arenas={name: _read_file(store, commit, entry) for name, entry in files.items()},
        state=manifest.state,
        world_size=manifest.world_size,
        versions=manifest.versions,
        finished=manifest.finished,
    )


def _read_file(store: Store, commit: CommitId, entry: FileEntry) -> Arena:
    path = f"{commit.name}/{entry.name}"
    url = f"{store.url}/{path}"
    size = store.storage.size(path)
    if size is None:
        raise CorruptCheckpointError(url, "the file is missing")
    if size != entry.size:
        raise CorruptCheckpointError(url, f"the file has {size} bytes, and the manifest says {entry.size}")
    buffer = allocate(size)
    if store.storage.read_into(path, buffer) != ReadBytes(size, entry.digest):
        raise CorruptCheckpointError(url, "the file's content does not match the manifest's digest")
    try:
        header = buffer[: layout.header_size(buffer[:8].tobytes(), size)].tobytes()
        return Arena(layout.parse(header, size), buffer)
    except ValueError as error:
        raise CorruptCheckpointError(url, str(error)) from error


def _lost(store: Store, since: int) -> list[int]:
    """The generations after ``since`` that had commits once, and have none now; newest first."""
    there = {commit.generation for commit in store.commits() if store.is_complete(commit)}
    later = [generation for generation in store.claims() if generation > since and generation not in there]
    return [generation for generation in later if store.read_claim(generation).acknowledged]


def _report_lost(store: Store, found: CommitId) -> None:
    for generation in _lost(store, found.generation):
        name = f"generation {generation}"
        message = f"{store.url}: going back to {found}, because of {name}: {_LOST}"
        store.events.emit("skipped", message, level=logging.WARNING, commit=name, reason=_LOST)


def _quarantine(store: Store, commit: CommitId, reason: str) -> None:
    _skip(store, commit, reason)
    note = json.dumps({"time": store.clock.now(), "reason": reason}).encode()
    try:
        if not store.is_quarantined(commit):
            store.storage.publish(f"{commit.name}/{QUARANTINE}", note)
    except StorageError as error:
        store.events.emit("write_failed", str(error), level=logging.WARNING, commit=commit.name)


def _skip(store: Store, commit: CommitId, reason: str) -> None:
    store.events.emit(
        "skipped",
        f"{store.url}: skipping {commit}: {reason}",
        level=logging.WARNING,
        commit=commit.name,
        reason=reason,
    )
