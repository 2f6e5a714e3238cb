"""Recalling the newest commit that a process before this one has left at a near root."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import digest
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.near import place
from hvdrecover.checkpoint.near.place import SLOT
from hvdrecover.checkpoint.near.slots import Slot
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.root import TENSORS
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.errors import CheckpointError, CorruptCheckpointError

PassedOver = Callable[[str, str], None]
"""Told of a commit that is not used: its name, and why."""


@dataclass(frozen=True)
class Recalled:
    """A commit of a process before this one.

    Attributes:
        snapshot: the commit.
        job: identity of the start of the job that made it, as ``JOB/START``.
    """

    snapshot: Snapshot
    job: str


def in_place(
    path: Path, usable: Callable[[CommitId], bool], passed_over: PassedOver
) -> tuple[Recalled | None, list[Slot]]:
    """Recall a commit without a copy, for the process that keeps the near root.

    Args:
        path: the near root.
        usable: whether a commit may be used at all.
        passed_over: told of commits that are not used.

    Returns:
        The newest commit that verifies, or None; and the slots that are left, commits oldest first. What is
        broken is deleted.
    """
    slots = [slot for folder in _folders(path) if (slot := _found(folder, passed_over)) is not None]
    slots.sort(key=lambda slot: slot.commit or CommitId(0, 0))
    recalled = None
    for slot in slots[::-1]:
        if slot.commit is not None and recalled is None:
            recalled = _verified(path, slot, usable, passed_over)
            if recalled is None:
                slot.open()
    return recalled, slots


def by_copy(path: Path, usable: Callable[[CommitId], bool], passed_over: PassedOver) -> Recalled | None:
    """Recall a commit into memory of this process; another one keeps the near root, and may change it.

    Args:
        path: the near root.
        usable: whether a commit may be used at all.
        passed_over: told of commits that are not used.
    """
    storage = LocalStorage(path)
    for commit in root.commits(storage):
        try:
            if usable(commit) and root.is_complete(storage, commit):
                job = _job(root.read_manifest(storage, commit))
                return Recalled(read_commit(storage, commit), job)
        except CheckpointError as error:
            passed_over(commit.name, str(error))
    return None


def _folders(path: Path) -> list[Path]:
    return [
        each
        for each in place.leftovers(path)
        if each.name.startswith(SLOT) or CommitId.parse(each.name) is not None
    ]


def _found(folder: Path, passed_over: PassedOver) -> Slot | None:
    try:
        return Slot.found(folder)
    except (OSError, ValueError) as error:
        passed_over(folder.name, f"it can't be mapped: {error}")
        Slot(folder, {}).delete()
        return None


def _verified(
    path: Path, slot: Slot, usable: Callable[[CommitId], bool], passed_over: PassedOver
) -> Recalled | None:
    commit = slot.commit
    assert commit is not None
    try:
        if not usable(commit) or not root.is_complete(LocalStorage(path), commit):
            return None
        manifest = root.read_manifest(LocalStorage(path), commit)
        _check(path, slot, manifest)
    except CheckpointError as error:
        passed_over(commit.name, str(error))
        return None
    return Recalled(Snapshot.of(manifest, slot.arenas), _job(manifest))


def _check(path: Path, slot: Slot, manifest: Manifest) -> None:
    """Make sure that a slot holds the very bytes that its manifest says.

    Raises:
        CorruptCheckpointError: it doesn't.
    """
    expected = {file.name.removesuffix(TENSORS): (file.size, file.digest) for file in manifest.files}
    if expected.keys() != slot.arenas.keys():
        raise CorruptCheckpointError(f"{path}/{manifest.id.name}", "its files are not those of its manifest")
    for name, (size, wanted) in expected.items():
        buffer = slot.arenas[name].buffer
        if len(buffer) != size or digest(buffer) != wanted:
            url = f"{path}/{manifest.id.name}/{name}{TENSORS}"
            raise CorruptCheckpointError(url, "the file's content does not match the manifest's digest")


def _job(manifest: Manifest) -> str:
    return str(manifest.writer.get("job", ""))
