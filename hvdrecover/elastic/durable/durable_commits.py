"""The durable side of a job, as one rank sees it: rank 0 writes commits, and all learn of failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

from hvdrecover import error_kinds, heartbeat
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.retrying import ATTEMPTS, retrying
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.elastic.agreement import reports
from hvdrecover.elastic.agreement.election import Standing
from hvdrecover.elastic.commits.memory import Memory
from hvdrecover.elastic.companions import Moment, Table, Voter
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.durable.durability import Durability
from hvdrecover.elastic.durable.near import NearSide
from hvdrecover.elastic.durable.pacing import Pacing
from hvdrecover.elastic.lifecycle import stalls
from hvdrecover.errors import HvdrecoverError, NoUsableCommitError
from hvdrecover.redaction import redact

SETTLE_SECONDS = 30.0  # how long a training function that failed waits for the write in flight


class DurableSide(Voter):
    """The durable side. Without a checkpoint root, all of it does nothing.

    As a voter it stops the job on all ranks if rank 0 finds that another job has taken the root, or that
    commits fail to become durable for too long.

    Args:
        settings: the user's wishes; None without a checkpoint root.
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
            self._writing = Durability.at(
                self._settings,
                job=context.place.job,
                host=context.config.host,
                rank=context.place.rank,
                events=context.events,
                clock=context.clock,
                pacing=self._pacing,
                max_age=context.config.max_durable_age,
                release=self._memory.arenas.release,
            )
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
