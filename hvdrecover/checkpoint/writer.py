"""Writing commits in the background."""

from __future__ import annotations

import logging
import threading

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.policy import retry_delay
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.store import Store
from hvdrecover.errors import FencedError, FlushTimeoutError, HvdrecoverError, StorageError

ATTEMPTS = 4


class BackgroundWriter:
    """Writes one snapshot at a time on a thread of its own.

    A snapshot that has been submitted must not be changed until `in_flight` is something else. A write that
    fails is tried again with back-off; if it never succeeds, the earlier durable commits stand, and `wait`
    raises. Nothing is raised in the thread that trains but `FencedError`, at the next `submit`.

    Args:
        store: where to write.
        rank: this process's rank, for the manifest.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._idle = threading.Event()
        self._idle.set()
        self._stop = threading.Event()
        self._snapshot: Snapshot | None = None
        self._error: HvdrecoverError | None = None
        self.last_durable: CommitId | None = None

    @property
    def in_flight(self) -> Snapshot | None:
        """The snapshot that is being written, if any."""
        return None if self._idle.is_set() else self._snapshot

    def submit(self, snapshot: Snapshot) -> None:
        """Start writing a snapshot; the writer must be idle.

        Raises:
            FencedError: an earlier write found that another job has taken the root.
        """
        if isinstance(self._error, FencedError):
            raise self._error
        if not self._idle.is_set():
            raise RuntimeError("a write is in flight")
        self._error = None
        self._snapshot = snapshot
        thread = threading.Thread(target=self._run, args=(snapshot,), name="hvdrecover-writer", daemon=True)
        self._idle.clear()
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._failed(snapshot.id, error, ATTEMPTS, logging.WARNING)
            self._idle.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.

        Raises:
            FlushTimeoutError: the time is over; the write goes on.
            StorageError: the last write failed for good.
            FencedError: another job has taken the root.
        """
        if not self._idle.wait(timeout):
            commit = self._snapshot.id.name if self._snapshot else "the commit"
            raise FlushTimeoutError(
                self._store.url,
                f"{commit} is not durable after {timeout} s; the write goes on. Wait again or longer.",
            )
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Give up retries; the attempt that is under way comes to its end."""
        self._stop.set()

    def _run(self, snapshot: Snapshot) -> None:
        try:
            self._write(snapshot)
        finally:
            self._idle.set()

    def _write(self, snapshot: Snapshot) -> None:
        commit, clock = snapshot.id, self._store.clock
        for attempt in range(1, ATTEMPTS + 1):
            started = clock.monotonic()
            try:
                self._store.write(snapshot, self._rank)
            except FencedError as error:
                self._failed(commit, error, attempt, logging.ERROR)
                return
            except Exception as error:
                self._failed(commit, error, attempt, logging.WARNING)
                if attempt == ATTEMPTS or clock.wait(self._stop, retry_delay(attempt)):
                    return
            else:
                self._error = None
                self.last_durable = commit
                self._store.events.emit(
                    "durable",
                    generation=commit.generation,
                    commit=commit.commit,
                    bytes=snapshot.nbytes,
                    seconds=clock.monotonic() - started,
                )
                return

    def _failed(self, commit: CommitId, error: Exception, attempt: int, level: int) -> None:
        if not isinstance(error, HvdrecoverError):
            cause, error = error, StorageError(self._store.url, f"writing {commit} failed: {error!r}")
            error.__cause__ = cause
        self._error = error
        self._store.events.emit(
            "write_failed",
            f"commit {commit.commit} is not durable (attempt {attempt} of {ATTEMPTS}): {error}",
            level=level,
            generation=commit.generation,
            commit=commit.commit,
            error=str(error),
            attempt=attempt,
        )
