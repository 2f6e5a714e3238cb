"""The records in event files: events, and the stints of processes between rendezvous."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdrecover.record import Event


@dataclass(frozen=True)
class Stint:
    """The work of one process from one rendezvous to the next.

    Attributes:
        sync: how it agreed with the others.
        numbers: its commits, in the order in which it made them.
        times: when it made them, in seconds since the Unix epoch; as long as ``numbers``.
        recovered: its first step, if that followed a recovery.
        finished: the end of the run.
        lost: how many steps it rolled back for the next rendezvous.
        left: when it set out for that, in seconds since the Unix epoch.
        durable: those of its commits that it has made durable.
    """

    sync: Event
    numbers: array[int]
    times: array[float]
    recovered: Event | None = None
    finished: Event | None = None
    lost: int = 0
    left: float | None = None
    durable: array[int] = field(default_factory=lambda: array("q"))

    @property
    def place(self) -> tuple[int, int, int]:
        """Generation, the commit that it resumed from, and number of ranks: the same for all ranks."""
        return (
            self.sync.whole("generation") or 0,
            self.sync.whole("commit") or 0,
            self.sync.whole("size") or 0,
        )


@dataclass(frozen=True)
class Log:
    """The contents of a folder of event files.

    Attributes:
        events: what guardians and supervisors tell, in order of time.
        stints: what training processes tell.
        spans: host to the times of its first and its last event of any kind.
        files: number of event files.
        passed_over: number of lines that are not events, such as one that a killed process left half-written.
    """

    events: tuple[Event, ...]
    stints: tuple[Stint, ...]
    spans: Mapping[str, tuple[float, float]]
    files: int
    passed_over: int

    @property
    def begin(self) -> float:
        """The first ``start``, or the first event if there is none, in seconds since the Unix epoch."""
        return min([event.time for event in self.of("start")] or [first for first, _ in self.spans.values()])

    @property
    def end(self) -> float:
        """The last event, in seconds since the Unix epoch."""
        return max(last for _, last in self.spans.values())

    def of(self, kind: str) -> list[Event]:
        """The events of a kind."""
        return [event for event in self.events if event.kind == kind]
