"""Commits that outlive their process, as one rank sees them: durable commits, and near commits.

Rank 0 writes durable commits, and all ranks learn of failures. One process of each host keeps the near tier,
in the host's shared memory, and all processes of the host recall commits from it.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hvdrecover import error_kinds, heartbeat
from hvdrecover.checkpoint import Checkpoint, CommitId, near_tier, redact, root
from hvdrecover.checkpoint.arena import Arena, Layout
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.checkpoint.near_tier import Keeper, NearTier
from hvdrecover.checkpoint.storage import ATTEMPTS, open_storage, retried
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.store import BackgroundWriter, Store, load_newest
from hvdrecover.errors import (
    CheckpointError,
    DurableAgeError,
    FlushTimeoutError,
    HvdrecoverError,
    NoUsableCommitError,
    StoppedError,
    StorageError,
)
from hvdrecover.state.hooks import Context, Hook, Moment, Table
from hvdrecover.state.horovod import paused
from hvdrecover.state.memory import Memory

SETTLE_SECONDS = 30.0  # how long a training function that failed waits for the write under way
# To give up at the end of a run loses the result of weeks of training, so pauses add up to 7 minutes there.
FINISH_ATTEMPTS = 25
REMINDER_SECONDS = 60.0  # between two lines about a wait


def is_due(settings: Checkpoint, commits_since: int, seconds_since: float) -> bool:
    commits, seconds = settings.every_commits, settings.every_seconds
    if commits is None and seconds is None:
        return True
    return bool(commits and commits_since >= commits) or bool(seconds and seconds_since >= seconds)


@dataclass(frozen=True)
class Standing:
    """The contents of a checkpoint root that a job has just claimed."""

    starts: Mapping[str, int]  # start to the generation of its claim, if no other job has replaced it
    durable: CommitId | None
    since: int  # the generation of the claim of the start that made the durable commit


# -- the near tier -------------------------------------------------------------------------------------------

Files = tuple[Mapping[str, Arena], Mapping[str, str]]
"""Files of a commit, and their digests, by attribute name."""


class NearSide:
    """The near tier. If it is off, no method does anything. If it fails, training continues."""

    def __init__(self, settings: Checkpoint | None, context: Context, memory: Memory) -> None:
        self._context, self._memory, self._arenas = context, memory, memory.arenas
        self._keeps = context.config.is_first_of_host
        self.folder: Path | None = None
        if settings is not None and settings.near is not None:
            near = context.config.near if settings.near == "auto" else settings.near
            if near != "off" and (near != "auto" or context.config.supervisor is not None):
                self._url = near_tier.named(settings.url)
                self.folder = near_tier.folder(near, self._url)
        self._keeper: Keeper | None = None
        self._recalled: Snapshot | None = None
        # Files of the near root that this process has mapped, by the names of their folders.
        self._mapped: dict[str, Mapping[str, Arena]] = {}
        # Why the tier is off, as last reported. None: it is on; empty: nothing was reported yet.
        self._said: str | None = ""
        self._awaits_lock = False

    def recall(self, newer_than: CommitId) -> Snapshot | None:
        """Return the newest commit that an earlier process left here, if it is newer than all in memory."""
        if self.folder is None:
            return None
        suspects, self._recalled = self._context.config.suspects, None
        if self._arenas.near is not None:  # an interrupted copy has destroyed the newest commit in memory
            return self._arenas.near.newest()
        self._recalled = self._read(lambda each: each > newer_than and not each.is_within(suspects))
        return self._recalled if self._keeps else None  # the host's other processes read it for `held`

    def held(self, commit: CommitId) -> Files:
        """Return the sealed files of a commit that this host has, and their digests; none if it has none."""
        if self.folder is not None and self._arenas.near is None:
            if self._recalled is None or self._recalled.id != commit:
                self._recalled = self._read(lambda each: each == commit)
            if self._recalled is not None:
                return self._recalled.arenas, self._recalled.digests or {}
        return {}, {}  # another rank sends it then

    def unsealed(self, layouts: Mapping[str, Layout]) -> Mapping[str, Arena]:
        """Return files of these layouts that an earlier process left unsealed, to be overwritten; or none."""
        if self._keeper is None or self._arenas.near is not None or self._memory.last.generation:
            return {}  # the newest commit in memory may be in such files
        with suppress(OSError):
            if (found := near_tier.unsealed(self._keeper.path, layouts)) is not None:
                folder, arenas = found
                self._mapped[folder] = arenas
                return arenas
        return {}

    def pass_over(self, commit: CommitId, reason: str) -> None:
        # Only one process of each host shows the line.
        shown = f"near tier: passing over {commit.name}: {reason}" if self._keeps else None
        facts = {"commit": commit.name, "reason": reason}
        self._context.events.emit("near_skipped", shown, level=logging.WARNING, **facts)

    def agreed(self) -> None:
        if self.folder is not None and self._keeps:
            self._begin(self.folder)  # from now on, this process may keep the host's near tier
            self.offer()
        self._recalled = None

    def offer(self) -> None:
        """Seal the newest commit in memory, if its files are in the near root."""
        newest = self._memory.newest
        if self._awaits_lock and self.folder is not None:
            self._begin(self.folder)  # a process that is being killed may still hold the lock
        if self._arenas.near is not None and newest is not None and not newest.finished:
            self._arenas.near.seal(newest)

    def settle(self, seconds: float) -> None:
        if self._arenas.near is not None:
            self._arenas.near.wait(seconds)

    def remove(self) -> None:
        """Delete the near root: this process leaves, and the commit is durable or others have it."""
        if self._arenas.near is not None:
            self._arenas.near.remove()
        elif self._keeper is not None:
            self._keeper.remove()
        self._arenas.near = self._keeper = None
        self._awaits_lock = False

    # -- inside ----------------------------------------------------------------------------------------

    def _read(self, usable: Callable[[CommitId], bool]) -> Snapshot | None:
        """Return the newest usable commit that verifies."""
        path = self.folder
        if path is None or not path.is_dir():
            return None
        storage = LocalStorage(path)

        def skipped(commit: CommitId, reason: str, error: CheckpointError | None) -> None:
            if error is not None:  # otherwise the folder is memory for a commit
                self.pass_over(commit, reason)
                if self._keeper is not None:
                    storage.remove(root.manifest_path(commit))

        try:
            near_tier.check_private(path)
            if self._keeps and self._keeper is None:
                self._keeper = Keeper.take(path)
            found = root.read_newest(
                storage,
                skipped,
                clock=self._context.clock,
                order=lambda commits: list(filter(usable, commits)),
                # The keeper may overwrite a commit while it is copied; the digests of the copy show that.
                load=root.copied if self._keeper is None else near_tier.mapped,
            )
            if found is not None and self._keeper is not None:
                self._mapped[found.id.name] = found.arenas
                for arena in found.arenas.values():
                    arena.shared = True  # so its files never become private memory
            return found
        except NoUsableCommitError:
            return None
        except (OSError, CheckpointError) as error:
            self._report(str(error))
            return None

    def _begin(self, path: Path) -> None:
        try:
            near_tier.make(path, self._url)
            self._keeper = self._keeper or Keeper.take(path)
            self._awaits_lock = self._keeper is None
            if self._keeper is None:
                reason = f"{path} is in use by another process, or by another state of this process"
                return self._report(reason)
            place = self._context.place
            writer = {"host": self._context.config.host, "rank": place.rank, "job": place.job}
            tier = self._arenas.near or NearTier(
                self._keeper, self._mapped, self._context.clock, self._report
            )
            tier.begin(writer)
            self._arenas.near, self._mapped = tier, {}
        except (OSError, StorageError) as error:
            self._report(str(error))

    def _report(self, refusal: str | None, nbytes: int = 0) -> None:
        """Emit an event when the tier turns on, for commits of ``nbytes``, or off, because of ``refusal``."""
        if refusal == self._said:
            return
        self._said = refusal
        message, level = f"near tier: off on {self._context.config.host}: {refusal}", logging.WARNING
        if refusal is None:
            level = logging.INFO
            message = (
                f"near tier: on: commits of {near_tier.size(nbytes)} outlive their processes in "
                f"{self.folder}, which has memory for {near_tier.BUFFERS} of them at most"
            )
        facts = {"on": refusal is None, "reason": refusal or "", "bytes": nbytes, "path": str(self.folder)}
        # Called on the tier's thread, too, perhaps between two rendezvous: `World.rank` would fail there.
        shown = message if self._context.events.rank == 0 else None
        self._context.events.emit("near", shown, level=level, **facts)


# -- durable commits -----------------------------------------------------------------------------------------


class DurableSide(Hook):
    """Durable commits and the near tier; without a checkpoint root, all methods do nothing."""

    votes_at = ("commit", "check")

    def __init__(self, settings: Checkpoint | None, context: Context, memory: Memory) -> None:
        self._settings = settings
        self.wanted = settings is not None
        self.strict = settings is None or settings.strict
        self.root = "" if settings is None else redact(settings.url)
        self._context = context
        self._clock = context.clock
        self._memory = memory
        self._max_age = context.config.max_durable_age or math.inf
        self._writer: BackgroundWriter | None = None
        self._commits_since = 0
        self._begun: float | None = None
        self._failure: HvdrecoverError | None = None
        # Whether rank 0 may wait for its storage in the next commit, for lack of memory.
        self.may_wait = False
        self.near = NearSide(settings, context, memory)
        memory.in_flight = lambda: None if self._writer is None else self._writer.in_flight
        memory.vacate = self._vacate

    @property
    def last_durable(self) -> CommitId | None:
        return None if self._writer is None else self._writer.last_durable

    # -- commits ---------------------------------------------------------------------------------------

    def offer(self, *, ask: bool) -> None:
        """Seal the newest commit in the near tier, and write it in the background if due, or if ``ask``."""
        self.near.offer()
        snapshot = self._memory.newest
        if self._settings is None or snapshot is None or (writer := self.writer()) is None:
            return
        self._commits_since += 1
        seconds = math.inf if self._begun is None else self._clock.monotonic() - self._begun
        if ask:
            with suppress(HvdrecoverError):  # the verdict names permanent errors
                self._submit(writer, snapshot, math.inf)  # after an attempt that is under way
        elif is_due(self._settings, self._commits_since, seconds):
            # Refused while a write is under way. In an outage, the newer commit replaces the one that could
            # not be written.
            self._try_to_submit(writer, snapshot)

    def flush(self, timeout: float | None, attempts: int = ATTEMPTS) -> None:
        """Wait until the newest commit is durable, or ``attempts`` have failed from now on."""
        snapshot = self._memory.newest
        if snapshot is None or (writer := self.writer()) is None:
            return
        if self._memory.objection is not None:
            raise self._memory.objection
        deadline = math.inf if timeout is None else self._clock.monotonic() + timeout
        if writer.last_durable == snapshot.id:
            return
        if writer.in_flight is not snapshot:
            self._submit(writer, snapshot, deadline)
        self._wait(writer, deadline, attempts)

    def make_durable(self, attempts: int) -> None:
        """Make the newest commit durable, and return when all ranks know that it is."""
        failure: HvdrecoverError | None = None
        with paused():
            try:
                self.flush(None, attempts)
            except HvdrecoverError as error:
                failure = error
            table = self._context.world.allgather([error_kinds.number(failure)], "hvdrecover.finish")
        if failure is not None:
            raise failure
        if failed := int(table.max()):
            raise _stopped(error_kinds.name(failed), "could not make the last commit durable")
        self.near.remove()

    def settle(self) -> None:
        """Wait for seals and writes that are under way, twice `SETTLE_SECONDS` at most; raise nothing."""
        self.near.settle(SETTLE_SECONDS)
        if self._writer is not None and self._verdict() is None:
            self._writer.hurry()
            with suppress(HvdrecoverError):
                if self._writer.wait(SETTLE_SECONDS):
                    self._writer.wait_for_cleanup(SETTLE_SECONDS)

    # -- recoveries ------------------------------------------------------------------------------------

    def claim(self, left: Mapping[str, str]) -> int:
        """Take the root for a new start of this job, on rank 0; return the generation that it may write."""
        # ``left``: the start of a job to the near commit that it left behind, with its host, in words.
        context, start, clock = self._context, uuid.uuid4().hex, self._context.clock
        context.place.join(f"{context.config.job}/{start}" if context.config.job else start)
        self.retire()  # an earlier attempt may have claimed the root as another start
        if (writer := retried(clock, self.writer)) is None:
            return 1
        again = context.config.claimed == self.root
        if left and not again:
            left = {start: f"{where} ({self.near.folder})" for start, where in left.items()}
            retried(clock, writer.store.claims.check_holds, left)
        return retried(clock, writer.store.claim_next, again=again)

    def read_newest(self, generation: int) -> Snapshot | None:
        """Read the newest durable commit of the root, which was claimed as this generation; None if none."""
        if (writer := self.writer()) is None:
            return None
        found = load_newest(writer.store, self._context.config.suspects)
        if found is None:  # a root that was unmounted after the claim must not look new
            writer.store.claims.check(generation)
        return found

    def newest(self) -> CommitId | None:
        """Return the newest durable commit that is not suspect, verified or not."""
        if (writer := self.writer()) is None:
            return None
        return retried(self._context.clock, writer.store.newest, self._context.config.suspects)

    def newest_verified(self, generation: int) -> CommitId | None:
        with suppress(NoUsableCommitError):
            found = self.read_newest(generation)
            return None if found is None else found.id
        return None

    def standing(self, newest: CommitId | None) -> Standing:
        """Return which near commits are valid beside this durable one."""
        clock, writer = self._context.clock, self.writer()
        if writer is None:
            return Standing({}, None, 0)
        claims = writer.store.claims
        since = 0 if newest is None else retried(clock, claims.first_of, newest.generation)
        return Standing(retried(clock, claims.unreplaced), newest, since)

    def ranks_agreed(self) -> None:
        """Note that the ranks have agreed on a commit: from now on, only rank 0 writes to the root."""
        self.near.agreed()
        if self.wanted:
            heartbeat.notify(root=self.root)  # the guardian hands it to the next process; see `claim`
        if self._context.world.rank() != 0:
            self.retire()
        elif self._writer is not None:
            self._writer.reinstate()

    def retire(self) -> None:
        if (writer := self._writer) is not None:
            writer.stop()
            # Memory that a running write may still read is never used again.
            self._memory.arenas.abandon(lambda: writer.in_flight)
            self._writer, self._commits_since, self._begun = None, 0, None

    def writer(self) -> BackgroundWriter | None:
        """Return the writer, made at the first call; None on ranks that do not write commits."""
        context = self._context
        if self._settings is None or not context.place.joined or context.place.rank != 0:
            return None
        if self._writer is None:
            store = Store(
                open_storage(self._settings.url),
                keep=self._settings.keep,
                job=context.place.job,
                host=context.config.host,
                events=context.events,
                clock=context.clock,
            )
            self._writer = BackgroundWriter(store, context.place.rank, self._memory.arenas.release)
        return self._writer

    # -- waiting for writes ----------------------------------------------------------------------------

    def _vacate(self) -> None:
        """Free memory: wait for the write under way, and give up a commit whose write fails."""
        writer = self._writer
        while writer is not None and writer.in_flight is not None:
            try:
                self._wait(writer, math.inf, attempts=1)
            except HvdrecoverError:  # the verdict names final errors
                writer.withdraw()
                if writer.in_flight is not None and (verdict := self._verdict()) is not None:
                    raise verdict from None

    def _try_to_submit(self, writer: BackgroundWriter, snapshot: Snapshot) -> bool:
        if taken := writer.submit(snapshot):
            self._commits_since, self._begun = 0, self._clock.monotonic()
        return taken

    def _submit(self, writer: BackgroundWriter, snapshot: Snapshot, deadline: float) -> None:
        while not self._try_to_submit(writer, snapshot):
            try:
                self._wait(writer, deadline, attempts=1)
            except StorageError:  # about an earlier commit, which this newer one replaces
                if self._verdict() is not None:
                    raise

    def _wait(self, writer: BackgroundWriter, deadline: float, attempts: int) -> None:
        def left() -> float:
            return max(0.0, deadline - self._clock.monotonic())

        writer.hurry(attempts)
        while not writer.wait(min(REMINDER_SECONDS, self._max_age, left())):
            if (verdict := self._verdict()) is not None:
                raise verdict
            url = writer.store.url
            waiting = f"the newest commit is not durable yet: {writer.describe()}"
            if left() == 0.0:
                raise FlushTimeoutError(url, f"{waiting}. The write continues; wait again or longer.")
            facts = {"seconds": writer.behind}
            self._context.events.emit("waiting", f"{url}: {waiting}", level=logging.WARNING, **facts)

    # -- as a voter ------------------------------------------------------------------------------------

    def numbers(self, moment: Moment) -> Sequence[int]:
        self._failure = self._verdict()
        asks = self._writer is not None and moment.kind == "commit" and heartbeat.watched()
        waits = asks and self._memory.is_short()
        return [0 if self._failure is None else error_kinds.number(self._failure), int(waits)]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        if moment.kind == "commit":
            self.may_wait = bool(table[:, 1].any())
        # Only rank 0 learns of a failure. If it left alone, the others would count it as lost and continue.
        if self._failure is not None:
            return self._failure
        failed = int(table[:, 0].max(initial=0))
        return _stopped(error_kinds.name(failed), "has stopped the job") if failed else None

    def _verdict(self) -> HvdrecoverError | None:
        if (writer := self._writer) is None:
            return None
        if writer.failure is not None or writer.behind <= self._max_age:
            return writer.failure
        return DurableAgeError(
            writer.store.url,
            f"no commit could be made durable for {writer.behind:.0f} s, and HVDRECOVER_MAX_DURABLE_AGE "
            f"allows {self._max_age:g} s, so the job stops: {writer.describe()}. Make the storage work and "
            "start the job again; it resumes from the last durable commit.",
        )


def _stopped(kind: str, deed: str) -> StoppedError:
    """Return the error that the other ranks raise after rank 0 has raised one of class ``kind``."""
    return StoppedError(f"rank 0 {deed} ({kind}); its error says why", kind)
