"""Reading every byte of a commit and comparing it with the manifest's digests.

Files are read through a buffer of a fixed size, so verifying takes little memory however large a commit is.
Nothing at the root is changed: whether to quarantine a broken commit is the business of the job that owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.inspection import catalog, contents
from hvdrecover.checkpoint.manifest import FileEntry
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError

PIECE = 1 << 26  # bytes

Advance = Callable[[int], None]
"""Is told how many more bytes have been read."""


@dataclass(frozen=True)
class Verdict:
    """The findings of verifying a commit.

    Attributes:
        id: the commit.
        problems: file name to what is wrong with it; empty if the commit is intact.
        nbytes: how many bytes of data files were read.
    """

    id: CommitId
    problems: dict[str, str]
    nbytes: int

    @property
    def intact(self) -> bool:
        """Return whether every byte is as it was written."""
        return not self.problems

    @property
    def text(self) -> str:
        """Return what is wrong, on one line."""
        return "; ".join(f"{file}: {problem}" for file, problem in self.problems.items())


def verify(storage: Storage, commit: CommitId, advance: Advance) -> Verdict:
    """Read a commit through and compare it with its digests.

    Raises:
        StorageError: the storage failed, which says nothing about the commit.
    """
    try:
        manifest = root.read_manifest(storage, commit)
    except (CorruptCheckpointError, FormatVersionError) as error:
        return Verdict(commit, dict([_problem(storage, commit, error)]), 0)
    problems: dict[str, str] = {}
    for entry in manifest.files:
        try:
            _verify_file(storage, commit, entry, advance)
        except CorruptCheckpointError as error:
            problems.update([_problem(storage, commit, error)])
    return Verdict(commit, problems, sum(entry.size for entry in manifest.files))


def _verify_file(storage: Storage, commit: CommitId, entry: FileEntry, advance: Advance) -> None:
    path = f"{commit.name}/{entry.name}"
    contents.layout_of(storage, commit, entry)  # the file's size, and its header
    buffer, found, position = allocate(min(PIECE, entry.size)), Digest(), 0
    while position < entry.size:
        piece = buffer[: entry.size - position]
        count = storage.read_into(path, piece, position).size
        if count < len(piece):
            raise CorruptCheckpointError(f"{storage.url}/{path}", "the file became shorter while it was read")
        found.update(piece)
        position += count
        advance(count)
    if found.hex() != entry.digest:
        raise CorruptCheckpointError(
            f"{storage.url}/{path}", "the file's content does not match the manifest's digest"
        )


def _problem(storage: Storage, commit: CommitId, error: Exception) -> tuple[str, str]:
    file, _, problem = root.reason(storage, commit, error).partition(": ")
    return file, problem


def due(storage: Storage, wanted: Sequence[str]) -> list[CommitId]:
    """The commits to verify: those that a user names, or all complete ones, newest first.

    Raises:
        UnknownCommitError: the root has no commit of a name, or is not a checkpoint root.
        StorageError: the storage failed.
    """
    if wanted:
        return list(dict.fromkeys(catalog.find(storage, name) for name in wanted))
    return [commit for commit in catalog.commits(storage) if root.is_complete(storage, commit)]


def verify_all(storage: Storage, commits: Sequence[CommitId], advance: Advance) -> dict[CommitId, Verdict]:
    """Verify commits, in the order given; those that a running job has deleted meanwhile are left out.

    Raises:
        StorageError: the storage failed.
    """
    verdicts = {}
    for commit in commits:
        verdict = verify(storage, commit, advance)
        if verdict.intact or storage.names(commit.name):
            verdicts[commit] = verdict
    return verdicts


def total_bytes(storage: Storage, commits: Sequence[CommitId]) -> int:
    """The size of the data files of some commits; those whose manifest can't be read count for nothing."""
    total = 0
    for commit in commits:
        with suppress(CorruptCheckpointError, FormatVersionError):
            total += sum(entry.size for entry in root.read_manifest(storage, commit).files)
    return total
