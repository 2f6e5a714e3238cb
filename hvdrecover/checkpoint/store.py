"""Write and delete durable commits at a checkpoint root."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress

from hvdrecover.checkpoint import claims, root
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import TENSORS, Manifest
from hvdrecover.checkpoint.retention import Pruner, delete_commit, incomplete, is_of_before
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage.interface import TEMPORARY, Storage, is_full
from hvdrecover.clock import Clock
from hvdrecover.errors import FencedError, ForeignRootError, StorageError
from hvdrecover.events import Events

_OF_THE_FILE_SYSTEM = {"lost+found"}


class Store:
    """One checkpoint root, for the process that writes to it (rank 0).

    Attributes:
        resumed: the commit that the job resumes from, if it was read from this root. It is not deleted
            before a later commit is durable.
    """

    def __init__(
        self, storage: Storage, *, keep: int | Keep, job: str, host: str, events: Events, clock: Clock
    ) -> None:
        self.storage = storage
        self.events = events
        self.clock = clock
        self.claims = Claims(storage, job=job, host=host, clock=clock)
        self._host = host
        self._pruner = Pruner(storage, Keep.of(keep), clock)
        self._begun: set[CommitId] = set()  # commits that this process has begun and not completed
        self._has_made_room = False
        self._has_warned = False  # that commits lack the number of `Keep.best`
        self.resumed: CommitId | None = None

    @property
    def url(self) -> str:
        return self.storage.url

    def claim_next(self, *, again: bool = False) -> int:
        """Claim a generation for a job that starts, later than all generations at the root.

        Earlier commits that have lost their manifest are marked as broken. Leftovers are not deleted here,
        since all ranks wait for this call: `write` deletes them before the first commit.

        Args:
            again: whether an earlier start of this job has claimed the root.
        """
        check_is_ours(self.storage)
        commits = root.commits(self.storage)
        generation = self.claims.take_after(
            max((commit.generation for commit in commits), default=0), again=again
        )
        self._quarantine(incomplete(self.storage, generation)[1])
        return generation

    def newest(self, suspects: Collection[tuple[str, str]] = ()) -> CommitId | None:
        """Return the newest commit that has a manifest, verified or not; for suspects see `load_newest`."""
        commits = (each for each in root.commits(self.storage) if not each.is_within(suspects))
        return next((each for each in commits if root.is_complete(self.storage, each)), None)

    def write(self, snapshot: Snapshot, rank: int, durable: Callable[[], None] = lambda: None) -> None:
        """Make a commit durable, then delete commits that retention no longer keeps.

        Before the first commit, the files that killed processes left are deleted. Before each commit, the
        incomplete files of this process are deleted. So the root never holds more than the commits to keep,
        one more, and the one that is being written. If the disk is full, all files that are not needed are
        deleted, and the write is tried again.

        Args:
            durable: called as soon as the commit is durable; deleting may take as long as writing.
        """
        commit = snapshot.id
        for attempt in (1, 2):
            try:
                manifest = self._publish(snapshot, rank)
                break
            except StorageError as error:
                if is_full(error):
                    self._free(commit)  # other programs need the disk more than a part of a commit
                if attempt == 2 or not is_full(error):
                    raise
        self._begun.discard(commit)
        self.resumed = None
        self.claims.acknowledge(commit.generation)
        durable()
        if (problem := self._pruner.note(manifest).problem) and not self._has_warned:
            self._has_warned = True
            message = f"{self.url}: no commit is kept as one of the best: {problem}"
            self.events.emit("no_metric", message, level=logging.WARNING, reason=problem)
        # A replaced job deletes nothing; its next write raises the error.
        with suppress(FencedError), self._reporting():
            self._clean_up(commit)

    def _publish(self, snapshot: Snapshot, rank: int) -> Manifest:
        commit = snapshot.id
        self.claims.take(commit.generation)
        self._delete_begun(but=commit)  # a newer commit replaces one whose write failed
        if not self._has_made_room:
            self._free(commit, more=1)
            self._has_made_room = True
        self._begun.add(commit)
        path = root.manifest_path(commit)
        # An earlier attempt may have failed after it published the manifest. While the files are written
        # again, that manifest would declare half-written files complete.
        self.storage.remove(path)
        digests = {
            name: self.storage.write(f"{commit.name}/{name}{TENSORS}", arena.buffer)
            for name, arena in snapshot.arenas.items()
        }
        writer = {"host": self._host, "pid": os.getpid(), "rank": rank}
        manifest = snapshot.manifest(digests, writer, self.clock.now())
        text = manifests.dumps(manifest)
        self.claims.check(commit.generation)
        self.storage.publish(path, text)
        return manifest

    # -- deletions -------------------------------------------------------------------------------------

    def _free(self, commit: CommitId, *, more: int = 0) -> None:
        """Delete all files that are not needed, even files of commits that this process has begun."""
        self.claims.check(commit.generation)
        self._delete_begun()
        self._clean_up(commit, more=more)
        with self._reporting():
            self.storage.tidy(lambda folder: is_of_before(folder, commit.generation))

    def _clean_up(self, commit: CommitId, *, more: int = 0) -> None:
        """Delete commits that retention does not keep, and those that earlier generations never completed.

        A commit that was complete and has lost its manifest is marked as broken, and left to the user.
        """

        def check() -> None:  # before each deletion: this process may have been stopped for a while
            self.claims.check(commit.generation)

        check()
        with self._reporting():
            self._pruner.prune(check, more=more, resumed=self.resumed)
        with self._reporting():
            begun, lost = incomplete(self.storage, commit.generation, self._pruner.good)
            self._quarantine(lost)
            for each in begun:
                with self._reporting():
                    check()
                    delete_commit(self.storage, each)
                    message = f"{self.url}: removed {each}, which was never completed"
                    self.events.emit("leftover", message, commit=each.name)

    def _delete_begun(self, but: CommitId | None = None) -> None:
        """Delete the files of commits that this process has begun, unless they are complete after all."""
        for commit in self._begun - {but}:
            with self._reporting():
                if not root.is_complete(self.storage, commit):
                    self.storage.delete(commit.name)
                self._begun.discard(commit)

    def _quarantine(self, lost: Collection[CommitId]) -> None:
        for commit in lost:
            with self._reporting():
                root.quarantine(self.storage, commit, root.MANIFEST_GONE, self.clock)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report any error but `FencedError` as a failed deletion: the commit must not fail because of it."""
        try:
            yield
        except FencedError:
            raise
        except Exception as error:
            what = (
                str(error) if isinstance(error, StorageError) else f"{self.url}: could not delete: {error!r}"
            )
            self.events.emit("not_deleted", what, level=logging.WARNING, error=what)


def check_is_ours(storage: Storage) -> None:
    """Refuse a root that holds files of other programs, or whose storage lacks a feature that we need."""
    names = set(storage.names()) - _OF_THE_FILE_SYSTEM - {root.CLAIMS, root.READERS}
    claimed = storage.names(root.CLAIMS)
    foreign = {name for name in names if CommitId.parse(name) is None and not name.startswith(TEMPORARY)}
    foreign |= {f"{root.CLAIMS}/{name}" for name in claimed}
    if foreign and not claims.among(claimed):
        raise ForeignRootError(
            storage.url,
            f"this folder holds files that hvdrecover did not write (such as '{min(foreign)}'), and was "
            "left untouched. Name an empty or a new folder as the checkpoint root.",
        )
    storage.check()
