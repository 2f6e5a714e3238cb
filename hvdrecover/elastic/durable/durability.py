"""Making commits durable, on the rank that does it: when, and waiting for it."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.retrying import ATTEMPTS
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.store import Store
from hvdrecover.checkpoint.writer import BackgroundWriter
from hvdrecover.clock import Clock
from hvdrecover.elastic.durable.interval import CAP
from hvdrecover.elastic.durable.pacing import Pacing
from hvdrecover.errors import DurableAgeError, FlushTimeoutError, HvdrecoverError, StorageError
from hvdrecover.events import Events

# At the end of a run, where giving up loses what weeks of training ended with: some 7 minutes of pauses.
FINISH_ATTEMPTS = 25
REMINDER_SECONDS = 60.0  # between the lines that say that something is still waited for


class Durability:
    """The durable side of commits on rank 0.

    Args:
        settings: the user's wishes.
        store: where commits go.
        writer: writes them there.
        clock: where times come from.
        pacing: how often commits become durable, if the settings leave it to us.
        max_age: for how many seconds commits may fail to become durable until the job is stopped.
    """

    def __init__(
        self,
        settings: Checkpoint,
        store: Store,
        writer: BackgroundWriter,
        clock: Clock,
        pacing: Pacing,
        max_age: float | None = None,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._pacing = pacing
        self._paced: CommitId | None = None  # the durable commit that pacing has been told of
        self._max_age = math.inf if max_age is None else max_age
        self._commits_since = 0
        self._begun: float | None = None
        self.store = store
        self.writer = writer

    @classmethod
    def at(
        cls,
        settings: Checkpoint,
        *,
        job: str,
        host: str,
        rank: int,
        events: Events,
        clock: Clock,
        pacing: Pacing,
        max_age: float | None = None,
        release: Callable[[Snapshot], None],
    ) -> Durability:
        """Begin at the root that the settings name; nothing is read or written yet.

        Args:
            settings: the user's wishes.
            job: the job's id, for claims and manifests.
            host: this host's name, for claims.
            rank: this process's rank.
            events: where to report.
            clock: where times come from.
            pacing: how often commits become durable, if the settings leave it to us.
            max_age: for how many seconds commits may fail to become durable until the job is stopped.
            release: called with each snapshot that is no longer being written.

        Raises:
            ConfigError: the root's URL can't be opened.
        """
        storage = open_storage(settings.url)
        store = Store(storage, keep=settings.keep, job=job, host=host, events=events, clock=clock)
        writer = BackgroundWriter(store, rank, release)
        return cls(settings, store, writer, clock, pacing, max_age)

    def offer(self, snapshot: Snapshot, *, ask: bool) -> None:
        """Have a fresh commit written if it is due and no attempt to write one is under way.

        In an outage it takes the place of the one that could not be written.

        Args:
            snapshot: the commit.
            ask: have it written in any case. An attempt that is under way is waited for first.
        """
        if self._pacing.on:
            self._stretch_ends()
        self._commits_since += 1
        seconds = math.inf if self._begun is None else self._clock.monotonic() - self._begun
        due = is_due(self._settings, self._commits_since, seconds, self._pacing.seconds)
        if ask:
            with contextlib.suppress(HvdrecoverError):  # `verdict` tells what is for good
                self._submit(snapshot, math.inf)
        elif due:
            self._try_to_submit(snapshot)
        if self._pacing.on:
            # Also where a short write that has just begun is over by now.
            beside = self._commits_since == 0 or not self.writer.wait_for_cleanup(0.0)
            self._pacing.begin(beside=beside)

    def flush(self, snapshot: Snapshot, timeout: float | None, attempts: int = ATTEMPTS) -> None:
        """Wait until this snapshot, the newest, is durable.

        Args:
            snapshot: the newest commit.
            timeout: seconds to wait; None waits for as long as it takes.
            attempts: how many may fail from now on.

        Raises:
            FlushTimeoutError: the time is over; the write continues.
            StorageError: it could not be written.
            FencedError: another job has taken the root.
        """
        deadline = math.inf if timeout is None else self._clock.monotonic() + timeout
        if self.writer.progress.last_durable == snapshot.id:
            return
        self._pacing.interrupt()
        if self.writer.in_flight is not snapshot:
            self._submit(snapshot, deadline)
        self._wait(deadline, attempts)

    def vacate(self) -> None:
        """Return when nothing is in flight: the memory is needed. What can't be written now is given up.

        Raises:
            DurableAgeError: a write hangs, and the job must stop.
        """
        while self.writer.in_flight is not None:
            try:
                self._wait(math.inf, attempts=1)
            except HvdrecoverError:  # `verdict` tells what is for good
                self.writer.withdraw()
                if self.writer.in_flight is not None and (verdict := self.verdict()) is not None:
                    raise verdict from None

    def verdict(self) -> HvdrecoverError | None:
        """Return why the job must stop, if it must."""
        progress = self.writer.progress
        if progress.failure is not None or progress.behind <= self._max_age:
            return progress.failure
        return DurableAgeError(
            self.store.url,
            f"no commit could be made durable for {progress.behind:.0f} s, and HVDRECOVER_MAX_DURABLE_AGE "
            f"allows {self._max_age:g} s, so the job stops: {progress.describe()}. Make the storage work and "
            "start the job again; it resumes from the last durable commit.",
        )

    def settle(self, seconds: float) -> None:
        """Give the write in flight this long, and a handful of attempts, to succeed; raise nothing.

        Then give the deletion of expired commits as long.
        """
        if self.verdict() is None:
            self.writer.hurry()
            with contextlib.suppress(HvdrecoverError):
                if self.writer.wait(seconds):
                    self.writer.wait_for_cleanup(seconds)

    def _stretch_ends(self) -> None:
        progress = self.writer.progress
        if progress.error is not None:
            self._pacing.interrupt()  # what an outage costs says nothing about a write
        self._pacing.end()
        if progress.last_durable is not None and progress.last_durable != self._paced:
            self._paced = progress.last_durable
            self._pacing.written(progress.seconds)
        if (decision := self._pacing.decide()) is not None:
            message = f"{self.store.url}: {decision.describe()}"
            self.store.events.emit("interval", message, **vars(decision), cap=CAP)

    def _try_to_submit(self, snapshot: Snapshot) -> bool:
        taken = self.writer.submit(snapshot)
        if taken:
            self._commits_since = 0
            self._begun = self._clock.monotonic()
        return taken

    def _submit(self, snapshot: Snapshot, deadline: float) -> None:
        """Submit a snapshot as soon as no attempt is under way."""
        while not self._try_to_submit(snapshot):
            try:
                self._wait(deadline, attempts=1)
            except StorageError:  # about an earlier commit; this newer one takes its place
                if self.verdict() is not None:
                    raise

    def _wait(self, deadline: float, attempts: int) -> None:
        self.writer.hurry(attempts)
        while not self.writer.wait(min(REMINDER_SECONDS, self._max_age, self._left(deadline))):
            if (verdict := self.verdict()) is not None:
                raise verdict
            waiting = f"the newest commit is not durable yet: {self.writer.progress.describe()}"
            if self._left(deadline) == 0.0:
                remedy = "The write continues; wait again or longer."
                raise FlushTimeoutError(self.store.url, f"{waiting}. {remedy}")
            message = f"{self.store.url}: {waiting}"
            facts = {"seconds": self.writer.progress.behind}
            self.store.events.emit("waiting", message, level=logging.WARNING, **facts)

    def _left(self, deadline: float) -> float:
        return max(0.0, deadline - self._clock.monotonic())


def is_due(settings: Checkpoint, commits_since: int, seconds_since: float, auto: float = 0.0) -> bool:
    """Return whether a commit should be made durable.

    Args:
        settings: the user's wishes.
        commits_since: commits since the last durable one, this one included.
        seconds_since: seconds since the last durable one was begun; ``inf`` when there is none.
        auto: with ``interval="auto"``, how many seconds that takes now.
    """
    if settings.interval == "auto":
        return seconds_since >= auto
    if settings.every_commits is None and settings.every_seconds is None:
        return True
    by_count = settings.every_commits is not None and commits_since >= settings.every_commits
    by_time = settings.every_seconds is not None and seconds_since >= settings.every_seconds
    return by_count or by_time
