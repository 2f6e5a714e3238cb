"""The progress of durable commits, and reports of it."""

from __future__ import annotations

import logging

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.clock import Clock
from hvdrecover.errors import HvdrecoverError, StorageError
from hvdrecover.events import Events


class Progress:
    """The record of one writer: what is durable, since when attempts fail, and why.

    Times are monotonic seconds. Only the thread that has a snapshot in hand changes it; any may read it.

    Args:
        url: the checkpoint root, for messages.
        events: where to report.
        clock: where times come from.

    Attributes:
        last_durable: the newest commit that has become durable.
        seconds: how long its write took.
        error: why the last attempt failed; None if it did not, so that there is no outage.
        failure: why nothing can be written any more; None as long as it can.
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
        self.seconds = 0.0
        self.error: StorageError | None = None
        self.failure: HvdrecoverError | None = None

    @property
    def behind(self) -> float:
        """For how many seconds a commit has waited to become durable; 0 if none waits.

        A newer one that takes the place of one that could not be written continues with its time.
        """
        since = self._behind_since
        return 0.0 if since is None else self._clock.monotonic() - since

    @property
    def age(self) -> float:
        """The age of the last durable commit in seconds, or since the beginning if there is none."""
        return self._clock.monotonic() - self._durable_since

    def describe_age(self) -> str:
        """The same for people."""
        if self.last_durable is None:
            return f"no commit has become durable in the {self.age:.0f} s since this process began to write"
        return f"the last durable commit, {self.last_durable.commit}, is {self.age:.0f} s old"

    def describe(self) -> str:
        """Return how it stands, for people."""
        if self.error is None:
            seconds = self._clock.monotonic() - self._submitted
            return f"the write has been under way for {seconds:.0f} s; {self.describe_age()}"
        error = str(self.error).rstrip(".")
        return f"{error}. Attempts that failed: {self._attempts}; {self.describe_age()}"

    def submitted(self) -> None:
        """There is a commit to write."""
        self._submitted = self._clock.monotonic()
        if self._behind_since is None:
            self._behind_since = self._submitted

    def succeeded(self, snapshot: Snapshot, seconds: float) -> None:
        """A commit has become durable; the write took this long."""
        over = None if self.error is None else self._outage_over(snapshot.id)
        self.seconds = seconds
        self.last_durable, self._durable_since = snapshot.id, self._submitted
        self.error = self._behind_since = None
        generation, commit = snapshot.id.generation, snapshot.id.commit
        self._events.emit(
            "durable", generation=generation, commit=commit, bytes=snapshot.nbytes, seconds=seconds
        )
        if over is not None:
            message, facts = over
            self._events.emit("outage_over", message, level=logging.WARNING, **facts)

    def failed(self, commit: CommitId, error: HvdrecoverError) -> None:
        """An attempt has failed; anything but a `StorageError` is for good."""
        if not isinstance(error, StorageError):
            self.failure = error
            message = f"commit {commit.commit} is not durable, and no later one will be: {error}"
            self._report("write_failed", commit, error, message, logging.ERROR, attempt=1)
            return
        begins = self.error is None
        self.count(error)
        message = f"commit {commit.commit} is not durable (attempt {self._attempts}): {error}"
        self._report("write_failed", commit, error, message, logging.DEBUG, attempt=self._attempts)
        if begins:
            cause = str(error).rstrip(".")
            message = (
                f"commit {commit.commit} could not be written: {cause}. Training continues, and this or a "
                f"later commit will be written when the storage works again; {self.describe_age()}"
            )
            self._report("outage", commit, error, message, logging.WARNING, age=self.age)

    def count(self, error: StorageError) -> None:
        """An attempt has failed, and it is not reported."""
        if self.error is None:
            self._outage_since, self._attempts = self._clock.monotonic(), 0
        self._attempts += 1
        self.error = error

    def reinstate(self) -> None:
        """A rendezvous has begun a new generation; being fenced under an earlier one means nothing now."""
        if self.failure is not None:
            self.failure = self._behind_since = None

    def _outage_over(self, commit: CommitId) -> tuple[str, dict[str, float]]:
        seconds = self._clock.monotonic() - self._outage_since
        message = (
            f"{self._url}: the storage works again after {seconds:.0f} s, and commit {commit.commit} is "
            f"durable; until now, {self.describe_age()}"
        )
        facts = {"generation": commit.generation, "commit": commit.commit, "attempts": self._attempts}
        return message, {**facts, "seconds": seconds, "age": self.age}

    def _report(
        self, kind: str, commit: CommitId, error: Exception, message: str, level: int, **facts: float
    ) -> None:
        generation, number = commit.generation, commit.commit
        self._events.emit(
            kind, message, level=level, generation=generation, commit=number, error=str(error), **facts
        )
