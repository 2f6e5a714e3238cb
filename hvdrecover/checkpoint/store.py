"""Write commits to a checkpoint root, and delete those that are no longer needed.

1. The training thread submits a snapshot to the `BackgroundWriter`. Until its write ends it is `in_flight`,
   and must not change.
2. The writer's thread writes it by `Store.write`. When it is durable, the writer releases it, and then
   deletes expired commits. A snapshot that is submitted meanwhile is written next.
3. A failed write begins an *outage*: the writer tries again, with pauses, until an attempt succeeds or the
   writer is stopped. During a pause, a newer snapshot may replace the one that waits.
4. An error that a retry cannot mend, such as another job at the root, stops all writing: `failure`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from hvdrecover.checkpoint import CommitId, Keep, claims, root
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.claims import Claims
from hvdrecover.checkpoint.manifest import TENSORS, Manifest, Snapshot
from hvdrecover.checkpoint.retention import (
    Survey,
    delete_commit,
    expired,
    facts_of,
    incomplete,
    is_of_before,
    survey,
)
from hvdrecover.checkpoint.storage import ATTEMPTS, TEMPORARY, Storage, is_full, pause_before
from hvdrecover.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FencedError,
    ForeignRootError,
    HvdrecoverError,
    NoUsableCommitError,
    StorageError,
)
from hvdrecover.events import Events
from hvdrecover.machine import Clock

_FAILED = "the job has failed right after it was loaded, more than once in the same way"
_LOST = "its commits are gone from the root"
_OF_THE_FILE_SYSTEM = {"lost+found"}


class Store:
    """One checkpoint root, for the process that writes to it (rank 0)."""

    def __init__(
        self, storage: Storage, *, keep: int | Keep, job: str, host: str, events: Events, clock: Clock
    ) -> None:
        self.storage = storage
        self.url = storage.url
        self.events = events
        self.clock = clock
        self.claims = Claims(storage, job=job, host=host, clock=clock)
        self._host = host
        self._keep = Keep.of(keep)
        self._facts: Survey = {}
        self._begun: set[CommitId] = set()  # commits that this process has begun and not completed
        self._has_made_room = False
        self._has_warned = False  # that commits lack the number of `Keep.best`
        # The commit that the job resumes from. It is not deleted before a later commit is durable.
        self.resumed: CommitId | None = None

    def claim_next(self, *, again: bool = False) -> int:
        """Claim a generation for a job that starts; ``again``: the job has claimed the root before."""
        check_is_ours(self.storage)
        newest = max((commit.generation for commit in root.commits(self.storage)), default=0)
        generation = self.claims.take_after(newest, again=again)
        # Leftovers are not deleted here, since all ranks wait: `write` deletes them before the first commit.
        self._quarantine(incomplete(self.storage, generation)[1])
        return generation

    def newest(self, suspects: Collection[tuple[str, str]] = ()) -> CommitId | None:
        """Return the newest commit that has a manifest, verified or not; for suspects see `load_newest`."""
        commits = (each for each in root.commits(self.storage) if not each.is_within(suspects))
        return next((each for each in commits if root.is_complete(self.storage, each)), None)

    def write(self, snapshot: Snapshot, rank: int, durable: Callable[[], None] = lambda: None) -> None:
        """Make a commit durable, call ``durable``, then delete commits that retention no longer keeps."""
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
        facts = self._facts[commit] = facts_of(manifest, self._keep.best)
        if (problem := facts.problem) and not self._has_warned:
            self._has_warned = True
            message = f"{self.url}: no commit is kept as one of the best: {problem}"
            self.events.emit("no_metric", message, level=logging.WARNING, reason=problem)
        with suppress(FencedError), self._reporting():  # a replaced job deletes nothing; its next write fails
            self._clean_up(commit)

    def _publish(self, snapshot: Snapshot, rank: int) -> Manifest:
        commit = snapshot.id
        self.claims.take(commit.generation)
        self._delete_begun(but=commit)  # a newer commit replaces one whose write failed
        # Leftovers are deleted first. So the root never holds more than the commits to keep, one more, and
        # the one that is being written.
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
        """Delete commits that retention does not keep, and those that earlier generations never completed."""
        # Also before each deletion: this process may have been stopped for a while.
        check = partial(self.claims.check, commit.generation)
        check()
        with self._reporting():
            self._facts = survey(self.storage, self._keep.best, self._facts)
            keep = replace(self._keep, last=self._keep.last + more)
            for each in expired(self._facts.values(), keep, self.clock.now()):
                # Until a later commit is durable, keep the one that the job resumed from, and those skipped.
                if self.resumed is None or each < self.resumed:
                    check()
                    # A reader may have marked it as broken since its manifest was read here.
                    if not root.is_quarantined(self.storage, each):
                        delete_commit(self.storage, each)
                    del self._facts[each]
        good = [each for each, facts in self._facts.items() if facts is not None]
        with self._reporting():
            begun, lost = incomplete(self.storage, commit.generation, good)
            # A commit that has lost its manifest is left to the user.
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
            is_known = isinstance(error, StorageError)
            what = str(error) if is_known else f"{self.url}: could not delete: {error!r}"
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


def load_newest(store: Store, suspects: Collection[tuple[str, str]] = ()) -> Snapshot | None:
    """Read the newest commit that verifies, for a job that resumes; None if the root never held one."""

    def say(name: str, reason: str, line: str) -> None:
        message = f"{store.url}: {line}: {reason}"
        store.events.emit("skipped", message, level=logging.WARNING, commit=name, reason=reason)

    def skipped(commit: CommitId, reason: str, error: CheckpointError | None) -> None:
        say(commit.name, reason, f"skipping {commit}")
        # A commit that the storage fails to deliver is not marked.
        if isinstance(error, CorruptCheckpointError):
            try:
                root.quarantine(store.storage, commit, reason, store.clock)
            except StorageError as failure:
                store.events.emit("write_failed", str(failure), level=logging.WARNING, commit=commit.name)

    def without_suspects(commits: list[CommitId]) -> list[CommitId]:
        # Suspects are commits after which the job has failed, as ranges of names. They are tried last, the
        # oldest first: even a suspect is better than a start from the beginning.
        last = [each for each in commits if each.is_within(suspects)]
        for commit in last:
            say(commit.name, _FAILED, f"passing over {commit}, which is suspect")
        return [commit for commit in commits if commit not in last] + last[::-1]

    snapshot = root.read_newest(store.storage, skipped, clock=store.clock, order=without_suspects)
    since = 0 if snapshot is None else snapshot.id.generation
    found = root.commits(store.storage)
    there = {commit.generation for commit in found if root.may_be_complete(store.storage, commit)}
    gone = [number for number in store.claims.generations() if number > since and number not in there]
    lost = [f"generation {number}" for number in gone if store.claims.read(number).acknowledged]
    if snapshot is None:
        if lost:
            raise NoUsableCommitError(store.url, dict.fromkeys(lost, _LOST))
        return None
    # The user may have repaired a commit that was marked earlier: it was verified again.
    store.storage.remove(root.quarantine_path(snapshot.id))
    store.resumed = snapshot.id
    for name in lost:
        say(name, _LOST, f"going back to {snapshot.id}, because of {name}")
    return snapshot


# -- in the background -------------------------------------------------------------------------------

BACKGROUND = 17  # niceness: training goes first, at a ratio of 45 to 1 for a core


def step_back(niceness: int = BACKGROUND) -> None:
    """Give this thread and those that it starts a lower CPU priority than training has, as Linux can."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


class BackgroundWriter:
    """Writes one snapshot at a time on a background thread. All methods are for the training thread."""

    def __init__(
        self, store: Store, rank: int, release: Callable[[Snapshot], None] = lambda snapshot: None
    ) -> None:
        self.store = store
        self._rank = rank
        self._release = release  # called with each snapshot just before it leaves `in_flight`
        self._clock = store.clock
        self._lock = threading.RLock()  # for all that both threads change
        self._snapshot: Snapshot | None = None
        self._attempting = False
        self._cleaned_up = threading.Event()  # set while the thread is not running
        self._cleaned_up.set()
        self._patience = 0  # how many more attempts may fail until `wait` ends
        self._answered = threading.Event()
        self._answered.set()
        self._wake = threading.Event()  # ends a pause
        self._stopped = False
        self._attempts = 0  # that have failed since the last durable commit
        # Times are monotonic seconds.
        self._submitted = self._durable_since = self._clock.monotonic()
        self._behind_since: float | None = None
        self._outage_since = 0.0
        self.last_durable: CommitId | None = None
        self.error: StorageError | None = None  # why the last attempt failed
        self.failure: HvdrecoverError | None = None  # after which no commit is written any more

    @property
    def in_flight(self) -> Snapshot | None:
        """The snapshot that is being written, or waits for the next attempt."""
        return self._snapshot

    def submit(self, snapshot: Snapshot) -> bool:
        """Begin to write a snapshot, in place of one that waits; return False if it cannot be taken now."""
        with self._lock:
            if self._stopped:
                raise RuntimeError("the writer has been stopped")
            if self._attempting or self.failure is not None:
                return False
            if self._snapshot is None:
                self._attempting = True  # the thread begins in a moment
                self._answered.clear()
            self._snapshot = snapshot
            self._submitted = self._clock.monotonic()
            if self._behind_since is None:
                self._behind_since = self._submitted
            idle = self._cleaned_up.is_set()
            self._cleaned_up.clear()
        if idle:
            threading.Thread(target=self._run, name="hvdrecover-writer", daemon=True).start()
        return True

    def hurry(self, attempts: int = ATTEMPTS) -> None:
        """End a pause, so that the next attempt begins. `wait` ends after this many more failed attempts."""
        with self._lock:
            if self._snapshot is not None:
                self._patience = attempts
                self._answered.clear()
                if not self._attempting:
                    self._wake.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is in flight, or `hurry`'s attempts have failed; False after ``timeout``."""
        if timeout is None:
            self._answered.wait()
        elif not self._clock.wait(self._answered, timeout):
            return False
        if self.failure is not None:
            raise self.failure.with_traceback(None)
        if (cause := self.error) is not None:
            raise StorageError(
                self.store.url,
                f"the newest commit could not be made durable: {self.describe()}. Memory holds it "
                "still. Make the storage work again, then flush or commit again.",
            ) from cause
        return True

    def withdraw(self) -> None:
        """Release a snapshot that waits for its next attempt. One that is being written stays in flight."""
        with self._lock:
            if not self._attempting:
                self._let_go()
                self._wake.set()

    def wait_for_cleanup(self, timeout: float) -> bool:
        """Wait until nothing is in flight and expired commits are deleted."""
        return self._clock.wait(self._cleaned_up, timeout)

    def stop(self) -> None:
        """Begin no further attempt. An attempt that is under way is completed."""
        with self._lock:
            self._stopped = True
            self._wake.set()

    def reinstate(self) -> None:
        """Allow writing again: a rendezvous has begun a new generation, which is not fenced."""
        if self.failure is not None:
            self.failure = self._behind_since = None

    @property
    def behind(self) -> float:
        """Return for how many seconds commits have waited to become durable; a newer one may replace one."""
        since = self._behind_since
        return 0.0 if since is None else self._clock.monotonic() - since

    def describe(self) -> str:
        if self.error is None:
            seconds = self._clock.monotonic() - self._submitted
            return f"the write has been under way for {seconds:.0f} s; {self._describe_age()}"
        error = str(self.error).rstrip(".")
        return f"{error}. Attempts that failed: {self._attempts}; {self._describe_age()}"

    def _describe_age(self) -> str:
        age = self._clock.monotonic() - self._durable_since
        if self.last_durable is None:
            return f"no commit has become durable in the {age:.0f} s since this process began to write"
        return f"the last durable commit, {self.last_durable.commit}, is {age:.0f} s old"

    # -- on the writer's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        step_back()
        failed = 0  # attempts since the last success, or since `hurry` ended a pause
        while True:
            with self._lock:
                if self._stopped or self.failure is not None:
                    self._let_go()
                if self._snapshot is None:
                    self._cleaned_up.set()
                    return
                self._attempting = True
                self._wake.clear()
            if self._attempt():
                failed = 0
                continue
            failed += 1
            if self.failure is None and self._clock.wait(self._wake, pause_before(failed)):
                failed = 0

    def _attempt(self) -> bool:
        snapshot, started = self._snapshot, self._clock.monotonic()
        assert snapshot is not None  # while an attempt is under way, only this thread releases it
        is_durable = False

        def durable() -> None:
            nonlocal is_durable
            is_durable = True
            try:
                self._succeeded(snapshot, self._clock.monotonic() - started)
            finally:
                self._let_go()

        try:
            self.store.write(snapshot, self._rank, durable)
        except Exception as error:  # the thread must survive to end the `wait` of the training thread
            if is_durable:
                _report_unhandled(error)  # perhaps an error of the user's log handler; the commit is durable
            else:
                self._failed(error)
        return is_durable

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, HvdrecoverError):
            error = StorageError(self.store.url, f"writing failed unexpectedly: {error!r}.")
        assert self._snapshot is not None
        # The error is kept. The frames of its traceback and of its causes would keep the snapshot's memory.
        error = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        try:
            self._report(self._snapshot.id, error)
        except Exception as unhandled:
            _report_unhandled(unhandled)
        with self._lock:
            self._attempting = False
            self._patience -= 1
            if self._patience == 0:
                self._answered.set()

    def _succeeded(self, snapshot: Snapshot, seconds: float) -> None:
        commit, attempts = snapshot.id, self._attempts
        self.last_durable, self._durable_since = commit, self._submitted
        self.error, self._behind_since, self._attempts = None, None, 0
        self._emit("durable", commit, bytes=snapshot.nbytes, seconds=seconds)
        if attempts:
            outage = self._clock.monotonic() - self._outage_since
            message = f"{self.store.url}: the storage works again after {outage:.0f} s; {commit} is durable"
            self._emit("outage_over", commit, message, logging.WARNING, attempts=attempts, seconds=outage)

    def _report(self, commit: CommitId, error: HvdrecoverError) -> None:
        """Note a failed attempt. Any error but a `StorageError` is final."""
        if not isinstance(error, StorageError):
            self.failure = error
            message = f"commit {commit.commit} is not durable, and no later one will be: {error}"
            return self._emit("write_failed", commit, message, logging.ERROR, error=str(error), attempt=1)
        self._attempts += 1
        self.error = error
        message = f"commit {commit.commit} is not durable (attempt {self._attempts}): {error}"
        facts = {"error": str(error), "attempt": self._attempts}
        self._emit("write_failed", commit, message, logging.DEBUG, **facts)
        if self._attempts == 1:
            self._outage_since = self._clock.monotonic()
            cause = str(error).rstrip(".")
            message = (
                f"commit {commit.commit} could not be written: {cause}. Training continues, and this or a "
                f"later commit will be written when the storage works again; {self._describe_age()}"
            )
            self._emit("outage", commit, message, logging.WARNING, error=str(error))

    def _emit(
        self, kind: str, commit: CommitId, message: str | None = None, level: int = logging.INFO, **facts: Any
    ) -> None:
        self.store.events.emit(kind, message, level=level, **vars(commit), **facts)

    def _let_go(self) -> None:
        with self._lock:
            if self._snapshot is not None:
                self._release(self._snapshot)
            self._snapshot = None
            self._attempting = False
            self._answered.set()


def _report_unhandled(error: Exception) -> None:
    """Print an error as if it had ended this thread."""
    facts = (type(error), error, error.__traceback__, threading.current_thread())
    threading.excepthook(threading.ExceptHookArgs(facts))
