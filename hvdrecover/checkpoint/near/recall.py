"""Recalling the newest commit that a process before this one has left at a near root."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import Manifest
from hvdrecover.checkpoint.near import place
from hvdrecover.checkpoint.near.place import SLOT
from hvdrecover.checkpoint.near.slots import Slot, of_folder
from hvdrecover.checkpoint.reader import read_commit
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.errors import CheckpointError, CorruptCheckpointError, StorageError

Files = tuple[Mapping[str, Arena], Mapping[str, str]]
"""Files of a commit, and their digests, by attribute name."""

Usable = Callable[[CommitId], bool]
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

    @property
    def start(self) -> str:
        """The identity of the start alone."""
        return self.job.rpartition("/")[2]


def found(path: Path, passed_over: PassedOver) -> list[Slot]:
    """Return the slots that are left at a near root, not mapped, by commit; what is nonsense is deleted.

    Args:
        path: the near root.
        passed_over: told of commits that are not used.
    """
    slots = [slot for folder in _folders(path) if (slot := _found(folder, passed_over)) is not None]
    return sorted(slots, key=lambda slot: slot.commit or CommitId(0, 0))


def in_place(path: Path, slots: Sequence[Slot], usable: Usable, passed_over: PassedOver) -> Recalled | None:
    """Recall the newest commit that verifies, without a copy; for the process that keeps the near root.

    Args:
        path: the near root.
        slots: what was `found` there; one whose commit is broken has none any more.
        usable: whether a commit may be used at all.
        passed_over: told of commits that are not used.
    """
    for slot in slots[::-1]:
        if slot.commit is not None and usable(slot.commit):
            try:
                return _verified(path, slot)
            except (CheckpointError, OSError) as error:
                passed_over(slot.commit.name, str(error))
                slot.open()
    return None


def by_copy(path: Path, usable: Usable, passed_over: PassedOver) -> Recalled | None:
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


def pass_over_others(path: Path, usable: Usable, passed_over: PassedOver) -> None:
    """Tell of the commits that other users have left of the same checkpoint root, as far as that can be seen.

    Args:
        path: this user's near root; it may not exist yet.
        usable: whether a commit might be used, if it were this user's.
        passed_over: told of the newest one of each user.
    """
    for other, user in place.of_others(path):
        storage = LocalStorage(other)
        with suppress(StorageError):
            for commit in root.commits(storage):
                if usable(commit) and root.is_complete(storage, commit):
                    passed_over(
                        commit.name, f"user {user} has made it, and only that user's jobs resume from {other}"
                    )
                    break


def newest(path: Path, usable: Usable) -> CommitId | None:
    """Return the newest sealed commit of a near root, verified or not; None if there is none.

    Args:
        path: the near root.
        usable: whether a commit may be used at all.

    Raises:
        StorageError: it can't be read.
    """
    return next(filter(usable, root.commits(LocalStorage(path))), None)


def borrowed(path: Path, commit: CommitId) -> Files:
    """Return what may be a commit, sealed or not, by its folder, without a copy; no file if there is none.

    Nobody vouches for it: it may be of another job, or have been overwritten meanwhile. If the digests are
    right, it stays right for as long as the arenas exist.

    Args:
        path: a near root that another process may keep.
        commit: which one.

    Raises:
        OSError: a folder or a file can't be read, or mapped.
        ValueError: a file is nonsense.
    """
    folder = next((each for each in _folders(path) if of_folder(each) == commit), None)
    if folder is None:
        return {}, {}
    slot = Slot.found(folder)
    slot.borrow()
    digests = slot.digests()
    return slot.arenas, digests


def _folders(path: Path) -> list[Path]:
    return [
        each
        for each in place.leftovers(path)
        if each.name.startswith(SLOT) or CommitId.parse(each.name) is not None
    ]


def _found(folder: Path, passed_over: PassedOver) -> Slot | None:
    try:
        folder = _completed(folder)
        return Slot.found(folder)
    except (OSError, ValueError) as error:
        if CommitId.parse(folder.name) is not None:  # else its process was killed while it was made
            passed_over(folder.name, f"it can't be mapped: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _completed(folder: Path) -> Path:
    """Return a sealed slot's folder under its manifest's name: to seal it anew, the manifest comes first."""
    if CommitId.parse(folder.name) is not None:  # else a manifest in there may be of what it held before
        with suppress(OSError, CheckpointError):
            sealed = manifests.loads((folder / manifests.FILE_NAME).read_bytes(), str(folder)).id
            if not (target := folder.with_name(sealed.name)).exists():
                return folder.rename(target)
    return folder


def _verified(path: Path, slot: Slot) -> Recalled:
    """Map a slot, and make sure that it holds the very bytes that its manifest says.

    Raises:
        CheckpointError: it doesn't.
        OSError: it can't be mapped.
    """
    assert slot.commit is not None
    manifest = root.read_manifest(LocalStorage(path), slot.commit)
    expected = manifest.by_attribute
    if expected.keys() != slot.layouts.keys():
        raise CorruptCheckpointError(f"{path}/{manifest.id.name}", "its files are not those of its manifest")
    digests = slot.digests()
    for name, file in expected.items():
        if slot.layouts[name].nbytes != file.size or digests[name] != file.digest:
            url = f"{path}/{manifest.id.name}/{file.name}"
            raise CorruptCheckpointError(url, "the file's content does not match the manifest's digest")
    return Recalled(Snapshot.of(manifest, slot.arenas), _job(manifest))


def _job(manifest: Manifest) -> str:
    return str(manifest.writer.get("job", ""))
