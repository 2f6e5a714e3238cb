"""The times that the parts of a recovery take, on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from hvdrecover import heartbeat
from hvdrecover.clock import Clock
from hvdrecover.elastic.durable.interval import Pacing
from hvdrecover.events import Events
from hvdrecover.state.hooks import Agreement, Hook

Part = Literal["reset", "rendezvous", "load", "sync", "first_step"]


class Timings(Hook):
    """Adds up the parts of each recovery; the last part is the first step of training.

    Args:
        clock: where times come from.
        events: takes the parts of each recovery.
        pacing: learns how long starts from durable commits take.
    """

    def __init__(self, clock: Clock, events: Events, pacing: Pacing) -> None:
        self._clock = clock
        self._events = events
        self._pacing = pacing
        self._parts: dict[Part, float] = {}
        self._agreements = 0

    def agreed(self, agreement: Agreement) -> None:
        """Wait for the end of the first step."""
        self._agreements += 1
        number, ended, commit = self._agreements, self._clock.monotonic(), agreement.snapshot.id
        is_durable = agreement.source == "durable"  # the agreement itself would keep its commit's memory

        def first_step() -> None:
            if number != self._agreements:
                return  # there was another rendezvous since then
            self.add("first_step", self._clock.monotonic() - ended)
            names: tuple[Part, ...] = ("reset", "rendezvous", "load", "sync", "first_step")
            parts: dict[str, Any] = {name: round(self.spent(name), 6) for name in names}
            seconds = round(sum(parts.values()), 6)
            self._parts = {}
            if is_durable:
                self._pacing.restored(seconds)
            self._events.emit("recovered", **vars(commit), **parts, seconds=seconds)

        heartbeat.at_progress(first_step)

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Add the time of the ``with`` block to a part."""
        started = self._clock.monotonic()
        try:
            yield
        finally:
            self.add(part, self._clock.monotonic() - started)

    def add(self, part: Part, seconds: float) -> None:
        """Add to a part."""
        self._parts[part] = self.spent(part) + seconds

    def spent(self, part: Part) -> float:
        """Return the seconds spent on a part of this recovery so far."""
        return self._parts.get(part, 0.0)
