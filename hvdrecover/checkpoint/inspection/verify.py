"""Reading every byte of commits and comparing it with the manifest's digests.

Files are read through a buffer of a fixed size, so verifying takes little memory. It changes nothing at the
root: only the job that owns a root quarantines its commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hvdrecover.checkpoint import root
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.inspection import catalog
from hvdrecover.checkpoint.manifest import FileEntry
from hvdrecover.checkpoint.storage import Storage
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError

PIECE = 1 << 26  # bytes

Advance = Callable[[int], None]
"""Is told how many more bytes have been read."""


@dataclass(frozen=True)
class Verdict:
    """The result of verifying a commit.

    Attributes:
        id: the commit.
        problems: file name to its problem; empty if the commit is intact.
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
        """Return the problems on one line."""
        return "; ".join(f"{file}: {problem}" for file, problem in self.problems.items())


def verify(storage: Storage, commit: CommitId, advance: Advance) -> Verdict:
    """Read a commit and compare it with its digests.

    Raises:
        StorageError: the storage failed, which says nothing about the commit.
    """
    problems: dict[str, str] = {}

    def note(error: Exception) -> None:
        file, _, problem = root.reason(storage, commit, error).partition(": ")
        problems[file] = problem

    try:
        files = root.read_manifest(storage, commit).files
    except (CorruptCheckpointError, FormatVersionError) as error:
        note(error)
        return Verdict(commit, problems, 0)
    for file in files:
        try:
            _verify_file(storage, commit, file, advance)
        except CorruptCheckpointError as error:
            note(error)
    return Verdict(commit, problems, sum(file.size for file in files))


def _verify_file(storage: Storage, commit: CommitId, file: FileEntry, advance: Advance) -> None:
    path = f"{commit.name}/{file.name}"
    catalog.layout_of(storage, commit, file)  # checks size and header
    buffer, found, position = allocate(min(PIECE, file.size)), Digest(), 0
    while position < file.size:
        piece = buffer[: file.size - position]
        count = storage.read_into(path, piece, position).size
        if count < len(piece):
            raise CorruptCheckpointError(f"{storage.url}/{path}", "the file became shorter while it was read")
        found.update(piece)
        position += count
        advance(count)
    if found.hex() != file.digest:
        raise CorruptCheckpointError(
            f"{storage.url}/{path}", "the file's content does not match the manifest's digest"
        )


def due(storage: Storage, wanted: Sequence[str]) -> list[CommitId]:
    """Return the commits that a user names, or all complete ones, newest first.

    Raises:
        UnknownCommitError: the root has no commit of a name, or is not a checkpoint root.
        StorageError: the storage failed.
    """
    if wanted:
        return list(dict.fromkeys(catalog.find(storage, name) for name in wanted))
    return [commit for commit in catalog.commits(storage) if root.is_complete(storage, commit)]


def verify_all(storage: Storage, commits: Sequence[CommitId], advance: Advance) -> dict[CommitId, Verdict]:
    """Verify commits in the given order; skip those that a running job deletes meanwhile.

    Raises:
        StorageError: the storage failed.
    """
    verdicts = {commit: verify(storage, commit, advance) for commit in commits}
    return {commit: each for commit, each in verdicts.items() if each.intact or storage.names(commit.name)}


def total_bytes(storage: Storage, commits: Sequence[CommitId]) -> int:
    """Return the size of the data files of commits, without those whose manifest cannot be read."""
    total = 0
    for commit in commits:
        with suppress(CorruptCheckpointError, FormatVersionError):
            total += sum(file.size for file in root.read_manifest(storage, commit).files)
    return total
