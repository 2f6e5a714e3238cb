"""Durable commits of a job, as one rank sees them: rank 0 writes them, and all ranks learn of failures."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hvdrecover import error_kinds, heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.retrying import ATTEMPTS, retrying
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.store import Store
from hvdrecover.checkpoint.writer import BackgroundWriter
from hvdrecover.elastic.agreement import reports
from hvdrecover.elastic.agreement.election import Standing
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.companions import Moment, Table, Voter
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.durable.interval import CAP, Pacing
from hvdrecover.elastic.durable.near import NearSide
from hvdrecover.elastic.lifecycle import stalls
from hvdrecover.errors import (
    DurableAgeError,
    FlushTimeoutError,
    HvdrecoverError,
    NoUsableCommitError,
    StorageError,
)
from hvdrecover.redaction import redact

SETTLE_SECONDS = 30.0  # how long a training function that failed waits for the write in flight
# At the end of a run, to give up loses the result of weeks of training: some 7 minutes of pauses.
FINISH_ATTEMPTS = 25
REMINDER_SECONDS = 60.0  # between the lines that say what is still waited for


def is_due(settings: Checkpoint, commits_since: int, seconds_since: float, auto: float = 0.0) -> bool:
    """Return whether a commit should be made durable.

    Args:
        settings: the user's settings.
        commits_since: commits since the last durable one, this one included.
        seconds_since: seconds since the last durable one was begun; ``inf`` when there is none.
        auto: the interval for ``interval="auto"``, in seconds.
    """
    if settings.interval == "auto":
        return seconds_since >= auto
    if settings.every_commits is None and settings.every_seconds is None:
        return True
    by_count = settings.every_commits is not None and commits_since >= settings.every_commits
    by_time = settings.every_seconds is not None and seconds_since >= settings.every_seconds
    return by_count or by_time


class Durability:
    """The writing of durable commits on rank 0: when, and waiting for it.

    Nothing is read or written at first.

    Args:
        settings: the user's settings.
        context: the surroundings.
        pacing: decides the interval, if the settings leave it open.
        release: called with each snapshot that is no longer being written.

    Raises:
        ConfigError: the root's URL cannot be opened.
    """

    def __init__(
        self, settings: Checkpoint, context: Context, pacing: Pacing, release: Callable[[Snapshot], None]
    ) -> None:
        self._settings = settings
        self._clock = context.clock
        self._pacing = pacing
        self._paced: CommitId | None = None  # the durable commit that pacing has been told of
        max_age = context.config.max_durable_age
        self._max_age = math.inf if max_age is None else max_age
        self._commits_since = 0
        self._begun: float | None = None
        self.store = Store(
            open_storage(settings.url),
            keep=settings.keep,
            job=context.place.job,
            host=context.config.host,
            events=context.events,
            clock=context.clock,
        )
        self.writer = BackgroundWriter(self.store, context.place.rank, release)

    def offer(self, snapshot: Snapshot, *, ask: bool) -> None:
        """Have a new commit written if it is due and no attempt to write one is under way.

        In an outage it takes the place of the one that could not be written.

        Args:
            snapshot: the commit.
            ask: have it written in any case. An attempt that is under way is waited for first.
        """
        if self._pacing.on:
            self._stretch_ends()
        self._commits_since += 1
        seconds = math.inf if self._begun is None else self._clock.monotonic() - self._begun
        if ask:
            with suppress(HvdrecoverError):  # `verdict` tells what is final
                self._submit(snapshot, math.inf)
        elif is_due(self._settings, self._commits_since, seconds, self._pacing.seconds):
            self._try_to_submit(snapshot)
        if self._pacing.on:
            # Also where a short write that has just begun is over by now.
            beside = self._commits_since == 0 or not self.writer.wait_for_cleanup(0.0)
            self._pacing.begin(beside=beside)

    def flush(self, snapshot: Snapshot, timeout: float | None, attempts: int = ATTEMPTS) -> None:
        """Wait until this snapshot, the newest, is durable; see `DurableSide.flush`."""
        deadline = math.inf if timeout is None else self._clock.monotonic() + timeout
        if self.writer.progress.last_durable == snapshot.id:
            return
        self._pacing.interrupt()
        if self.writer.in_flight is not snapshot:
            self._submit(snapshot, deadline)
        self._wait(deadline, attempts)

    def vacate(self) -> None:
        """Return when nothing is in flight: the memory is needed. What cannot be written now is given up.

        Raises:
            DurableAgeError: a write hangs, and the job must stop.
        """
        while self.writer.in_flight is not None:
            try:
                self._wait(math.inf, attempts=1)
            except HvdrecoverError:  # `verdict` tells what is final
                self.writer.withdraw()
                if self.writer.in_flight is not None and (verdict := self.verdict()) is not None:
                    raise verdict from None

    def verdict(self) -> HvdrecoverError | None:
        """Return the reason why the job must stop, if it must."""
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
        """Give the write in flight this long, and a few attempts, to succeed; raise nothing.

        Then give the deletion of expired commits as long.
        """
        if self.verdict() is None:
            self.writer.hurry()
            with suppress(HvdrecoverError):
                if self.writer.wait(seconds):
                    self.writer.wait_for_cleanup(seconds)

    def _stretch_ends(self) -> None:
        progress = self.writer.progress
        if progress.error is not None:
            self._pacing.interrupt()  # the cost of an outage says nothing about a write
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


class DurableSide(Voter):
    """Durable commits and the near tier. Without a checkpoint root, all methods do nothing.

    As a voter it stops the job on all ranks if rank 0 finds that another job has taken the root, or that
    commits fail to become durable for too long.

    Args:
        settings: the user's settings; None without a checkpoint root.
        context: the surroundings.
        pacing: decides how often commits become durable, if the settings leave it open.
        memory: holds the commits.

    Attributes:
        near: the near tier.
    """

    def __init__(self, settings: Checkpoint | None, context: Context, pacing: Pacing, memory: Memory) -> None:
        self._settings = settings
        self._context = context
        self._pacing = pacing
        self._memory = memory
        self._writing: Durability | None = None
        self._failure: HvdrecoverError | None = None
        self._loaded: Snapshot | None = None
        self.near = NearSide(settings, context, memory)
        memory.in_flight, memory.vacate = self._in_flight, self._vacate

    # -- facts -----------------------------------------------------------------------------------------

    @property
    def wanted(self) -> bool:
        """Return whether there is a checkpoint root."""
        return self._settings is not None

    @property
    def strict(self) -> bool:
        """Return whether a durable commit must fit the state exactly."""
        return self._settings is None or self._settings.strict

    @property
    def root(self) -> str:
        """The checkpoint root without credentials; empty if there is none."""
        return redact(self._settings.url) if self._settings is not None else ""

    @property
    def last_durable(self) -> CommitId | None:
        """The newest commit that this rank has made durable; None on all ranks but 0."""
        return self._writing.writer.progress.last_durable if self._writing is not None else None

    # -- commits ---------------------------------------------------------------------------------------

    def offer(self, *, ask: bool) -> None:
        """Have the newest commit in memory sealed near by, and written in the background if it is due.

        Args:
            ask: have it written in any case; an attempt that is under way is waited for first.
        """
        self.near.offer()
        if self._memory.newest is not None and (writing := self.writing()) is not None:
            writing.offer(self._memory.newest, ask=ask)

    def flush(self, timeout: float | None, attempts: int = ATTEMPTS) -> None:
        """Wait until the newest commit in memory is durable; ranks other than 0 have nothing to wait for.

        Args:
            timeout: seconds to wait; None waits for as long as it takes.
            attempts: how many may fail from now on.

        Raises:
            FlushTimeoutError: the time is over; the write continues.
            StorageError: it could not be written.
            FencedError: another job has taken the checkpoint root.
            NumericsError: it holds parameters that are not finite, and the state has a guard.
        """
        if self._memory.newest is None or (writing := self.writing()) is None:
            return
        if self._memory.objection is not None:
            raise self._memory.objection
        writing.flush(self._memory.newest, timeout, attempts)

    def make_durable(self, attempts: int) -> None:
        """Make the newest commit durable, and return when all ranks know that it is.

        Args:
            attempts: how many may fail.

        Raises:
            CheckpointError: it could not be made durable.
            RecoveryError: the same, on ranks other than 0.
        """
        failure: HvdrecoverError | None = None
        with stalls.paused():
            try:
                self.flush(None, attempts)
            except HvdrecoverError as error:
                failure = error
            table = self._context.world.allgather([error_kinds.number(failure)], "hvdrecover.finish")
        if failure is not None:
            raise failure
        if failed := int(table.max()):
            raise reports.stopped(error_kinds.name(failed), "could not make the last commit durable")
        self.near.remove()

    # -- recoveries ------------------------------------------------------------------------------------

    def claim(self, left: Mapping[str, str]) -> int:
        """Take the root for this job, on the rank that starts it; return the generation that it may write.

        Args:
            left: by start of a job, which near commit it has left on which host.

        Raises:
            CheckpointError: the root can't be used.
        """
        retry = retrying(self._context.clock)
        if (writing := retry(self.writing)) is None:
            return 1
        again = self._context.config.claimed == self.root
        if left and not again:
            left = {start: f"{where} ({self.near.folder})" for start, where in left.items()}
            retry(writing.store.claims.check_holds, left)
        return retry(writing.store.claim_next, again=again)

    def load(self) -> Snapshot | None:
        """Read the newest durable commit of the root that was claimed; None if there is none.

        Raises:
            CheckpointError: the root can't be used.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None and (writing := self.writing()) is not None:
            return load_newest(writing.store, self._context.config.suspects)
        return loaded

    def standing(self, verified: bool) -> Standing:
        """Return what decides between near commits and durable ones, of the root that was claimed.

        Args:
            verified: whether the durable commit has to be one that verifies. It is read, and kept for `load`.

        Raises:
            StorageError: the storage failed.
        """
        retry, writing = retrying(self._context.clock), self.writing()
        if writing is None:
            return Standing({}, None, 0)
        suspects = self._context.config.suspects
        newest = retry(writing.store.newest, suspects)
        if verified or suspects:  # a suspect one is marked, also where a near commit is taken in its place
            with suppress(NoUsableCommitError):
                self._loaded = self.load()
            newest = None if self._loaded is None else self._loaded.id
        claims = writing.store.claims
        since = 0 if newest is None else retry(claims.first_of, newest.generation)
        return Standing(retry(claims.unreplaced), newest, since)

    def agreed(self) -> None:
        """The ranks have agreed on a commit: only rank 0 writes to the root from now on."""
        self.near.agreed()
        self._loaded = None
        if self.wanted:
            heartbeat.notify(root=self.root)  # which the guardian tells the next process; see `claim`
        if self._context.world.rank() != 0:
            self.retire()
        elif self._writing is not None:
            self._writing.writer.progress.reinstate()

    def retire(self) -> None:
        """Stop writing. Memory that may still be read for a write is never used again."""
        self._loaded = None
        if self._writing is not None:
            self._writing.writer.stop()
            writer = self._writing.writer
            self._memory.arenas.abandon(lambda: writer.in_flight)
            self._writing = None

    def settle(self) -> None:
        """Let what is under way come to an end, near by and at the root; when a training function ends."""
        self.near.settle(SETTLE_SECONDS)
        if self._writing is not None:
            self._writing.settle(SETTLE_SECONDS)

    def writing(self) -> Durability | None:
        """Return what writes commits, on the rank that does; None on the others.

        Raises:
            ConfigError: the root's URL can't be opened.
        """
        context = self._context
        if self._settings is None or not context.place.joined or context.place.rank != 0:
            return None
        if self._writing is None:
            release = self._memory.arenas.release
            self._writing = Durability(self._settings, context, self._pacing, release)
        return self._writing

    def _in_flight(self) -> Snapshot | None:
        return self._writing.writer.in_flight if self._writing is not None else None

    def _vacate(self) -> None:
        if self._writing is not None:
            self._writing.vacate()

    # -- a voter ---------------------------------------------------------------------------------------

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send the number of an error that must stop the job."""
        if moment.kind == "rendezvous":
            return ()
        self._failure = self._writing.verdict() if self._writing is not None else None
        return [error_kinds.number(self._failure)]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Return this rank's error, or what stands for that of rank 0.

        If rank 0 left alone, the others would take it for lost, and continue without it.
        """
        if self._failure is not None:
            return self._failure
        failed = int(table.max(initial=0))
        return reports.stopped(error_kinds.name(failed), "has stopped the job") if failed else None
