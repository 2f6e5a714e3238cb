"""Making commits durable, on the rank that does it: when, and waiting for it."""

from __future__ import annotations

import math

from hvdrecover.checkpoint.policy import is_due
from hvdrecover.checkpoint.settings import Checkpoint
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import open_storage
from hvdrecover.checkpoint.store import Store
from hvdrecover.checkpoint.writer import BackgroundWriter
from hvdrecover.clock import Clock
from hvdrecover.errors import FencedError, StorageError
from hvdrecover.events import Events


class Durability:
    """The durable side of commits on rank 0.

    Args:
        settings: the user's wishes.
        store: where commits go.
        rank: this process's rank.
        clock: where times come from.
    """

    def __init__(self, settings: Checkpoint, store: Store, rank: int, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._commits_since = 0
        self._begun: float | None = None
        self.store = store
        self.writer = BackgroundWriter(store, rank)

    @classmethod
    def at(
        cls, settings: Checkpoint, *, job: str, host: str, rank: int, events: Events, clock: Clock
    ) -> Durability:
        """Begin at the root that the settings name; nothing is read or written yet.

        Raises:
            ConfigError: the root's URL can't be opened.
        """
        storage = open_storage(settings.url)
        store = Store(storage, keep=settings.keep, job=job, host=host, events=events, clock=clock)
        return cls(settings, store, rank, clock)

    def offer(self, snapshot: Snapshot, *, ask: bool) -> None:
        """Make a fresh commit durable if it is due and no write is in flight, or in any case if asked to.

        If asked to while a write is in flight, that write is waited for first.

        Raises:
            FencedError: another job has taken the root.
        """
        self._commits_since += 1
        seconds = math.inf if self._begun is None else self._clock.monotonic() - self._begun
        if not ask and (
            self.writer.in_flight is not None or not is_due(self._settings, self._commits_since, seconds)
        ):
            return
        self._submit_after_current(snapshot, None)

    def flush(self, snapshot: Snapshot, timeout: float | None) -> None:
        """Wait until this snapshot, the newest, is durable.

        Raises:
            FlushTimeoutError: the time is over; the write goes on.
            StorageError: it could not be written.
            FencedError: another job has taken the root.
        """
        deadline = math.inf if timeout is None else self._clock.monotonic() + timeout
        if self.writer.last_durable != snapshot.id and self.writer.in_flight is not snapshot:
            self._submit_after_current(snapshot, timeout)
        self.writer.wait(None if timeout is None else max(0.0, deadline - self._clock.monotonic()))

    def _submit_after_current(self, snapshot: Snapshot, timeout: float | None) -> None:
        try:
            self.writer.wait(timeout)
        except FencedError:
            raise
        except StorageError:
            pass  # an earlier commit that could not be written; this newer one makes up for it
        self.writer.submit(snapshot)
        self._commits_since = 0
        self._begun = self._clock.monotonic()
