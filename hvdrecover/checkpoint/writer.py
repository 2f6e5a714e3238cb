"""Write commits in the background, and retry while the storage fails.

1. The training thread submits a snapshot. Until its write ends it is `in_flight`, and must not change.
2. The writer's thread writes it by `Store.write`. When it is durable, the writer releases it, and then
   deletes expired commits. A snapshot that is submitted meanwhile is written next.
3. A failed write begins an *outage*: the writer tries again, with pauses, until an attempt succeeds or the
   writer is stopped. During a pause, a newer snapshot may replace the one that waits.
4. An error that a retry cannot mend, such as another job at the root, stops all writing: `Progress.failure`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage.interface import ATTEMPTS, pause_before
from hvdrecover.checkpoint.store import Store
from hvdrecover.clock import Clock
from hvdrecover.errors import HvdrecoverError, StorageError
from hvdrecover.events import Events

BACKGROUND = 17  # niceness: training goes first, at a ratio of 45 to 1 for a core


def step_back(niceness: int = BACKGROUND) -> None:
    """Give this thread and those that it starts a lower CPU priority than training has, as Linux can."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


class Progress:
    """The record of one writer: the last durable commit, and why and since when attempts fail.

    Times are monotonic seconds. Only the thread that handles the snapshot changes it; any thread may read.

    Attributes:
        error: why the last attempt failed; None if it succeeded, so there is no outage.
        failure: the error after which no commit is written any more; None if there was none.
    """

    def __init__(self, url: str, events: Events, clock: Clock) -> None:
        self._url = url
        self._events = events
        self._clock = clock
        self._submitted = self._durable_since = clock.monotonic()
        self._behind_since: float | None = None
        self._outage_since = 0.0
        self._attempts = 0
        self.last_durable: CommitId | None = None
        self.error: StorageError | None = None
        self.failure: HvdrecoverError | None = None

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

    def submitted(self) -> None:
        self._submitted = self._clock.monotonic()
        if self._behind_since is None:
            self._behind_since = self._submitted

    def succeeded(self, snapshot: Snapshot, seconds: float) -> None:
        commit, attempts = snapshot.id, self._attempts
        self.last_durable, self._durable_since = commit, self._submitted
        self.error, self._behind_since, self._attempts = None, None, 0
        self._emit("durable", commit, bytes=snapshot.nbytes, seconds=seconds)
        if attempts:
            outage = self._clock.monotonic() - self._outage_since
            message = f"{self._url}: the storage works again after {outage:.0f} s; {commit} is durable"
            self._emit("outage_over", commit, message, logging.WARNING, attempts=attempts, seconds=outage)

    def failed(self, commit: CommitId, error: HvdrecoverError) -> None:
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

    def reinstate(self) -> None:
        """Allow writing again: a rendezvous has begun a new generation, which is not fenced."""
        if self.failure is not None:
            self.failure = self._behind_since = None

    def _describe_age(self) -> str:
        age = self._clock.monotonic() - self._durable_since
        if self.last_durable is None:
            return f"no commit has become durable in the {age:.0f} s since this process began to write"
        return f"the last durable commit, {self.last_durable.commit}, is {age:.0f} s old"

    def _emit(
        self, kind: str, commit: CommitId, message: str | None = None, level: int = logging.INFO, **facts: Any
    ) -> None:
        numbers = {"generation": commit.generation, "commit": commit.commit}
        self._events.emit(kind, message, level=level, **numbers, **facts)


class BackgroundWriter:
    """Writes one snapshot at a time on a background thread. All methods are for the training thread.

    Args:
        release: called with each snapshot just before it is no longer `in_flight`.
    """

    def __init__(
        self, store: Store, rank: int, release: Callable[[Snapshot], None] = lambda snapshot: None
    ) -> None:
        self.store = store
        self._rank = rank
        self._release = release
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
        self.progress = Progress(store.url, store.events, store.clock)

    @property
    def in_flight(self) -> Snapshot | None:
        """The snapshot that is being written, or waits for the next attempt, if any."""
        return self._snapshot

    def submit(self, snapshot: Snapshot) -> bool:
        """Begin to write a snapshot. If an earlier one waits for its next attempt, replace it.

        Return False if an attempt is under way, or a final error has stopped writing.
        """
        with self._lock:
            if self._stopped:
                raise RuntimeError("the writer has been stopped")
            if self._attempting or self.progress.failure is not None:
                return False
            if self._snapshot is None:
                self._attempting = True  # the thread begins in a moment
                self._answered.clear()
            self._snapshot = snapshot
            self.progress.submitted()
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
        """Wait until nothing is in flight, or until the number of attempts given to `hurry` have failed.

        Return False after ``timeout`` seconds; raise the error if the last attempt has failed.
        """
        if timeout is None:
            self._answered.wait()
        elif not self.store.clock.wait(self._answered, timeout):
            return False
        if self.progress.failure is not None:
            raise self.progress.failure.with_traceback(None)
        if (cause := self.progress.error) is not None:
            raise StorageError(
                self.store.url,
                f"the newest commit could not be made durable: {self.progress.describe()}. Memory holds it "
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
        return self.store.clock.wait(self._cleaned_up, timeout)

    def stop(self) -> None:
        """Begin no further attempt. An attempt that is under way is completed."""
        with self._lock:
            self._stopped = True
            self._wake.set()

    # -- on the writer's thread ------------------------------------------------------------------------

    def _run(self) -> None:
        step_back()
        failed = 0  # attempts since the last success, or since `hurry` ended a pause
        while True:
            with self._lock:
                if self._stopped or self.progress.failure is not None:
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
            if self.progress.failure is None and self.store.clock.wait(self._wake, pause_before(failed)):
                failed = 0

    def _attempt(self) -> bool:
        """Write the snapshot; return whether it is durable."""
        snapshot, started = self._snapshot, self.store.clock.monotonic()
        assert snapshot is not None  # while an attempt is under way, only this thread releases it
        is_durable = False

        def durable() -> None:
            nonlocal is_durable
            is_durable = True
            try:
                self.progress.succeeded(snapshot, self.store.clock.monotonic() - started)
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
            self.progress.failed(self._snapshot.id, error)
        except Exception as unhandled:
            _report_unhandled(unhandled)
        with self._lock:
            self._attempting = False
            self._patience -= 1
            if self._patience == 0:
                self._answered.set()

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
