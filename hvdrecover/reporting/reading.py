"""Finding a run's event files, and reading them; also while processes append to them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdrecover import record
from hvdrecover.record import Event
from hvdrecover.reporting.records import Log, Stint

_KEPT = frozenset({"start", "end", "fault", "restart", "gave_up"})  # of the others only the time counts


def read(folder: Path) -> Log:
    """Read the record of a run.

    Raises:
        ConfigError: there is no record, or it cannot be read.
    """
    processes: dict[str, Process] = {}
    for event in record.read(folder):
        processes.setdefault(f"{event.host}-{event.pid}", Process()).take(event)
    spans: dict[str, tuple[float, float]] = {}
    for process in processes.values():
        for host, (first, last) in process.spans.items():
            begin, end = spans.get(host, (first, last))
            spans[host] = (min(begin, first), max(end, last))
    events = (event for process in processes.values() for event in process.events)
    return Log(
        events=tuple(sorted(events, key=lambda event: event.time)),
        stints=tuple(stint for process in processes.values() for stint in process.stints),
        spans=spans,
        files=1,
        passed_over=0,
    )


@dataclass
class Process:
    """The contents of one file, as far as it has been read.

    Attributes:
        events: of guardians and supervisors.
        spans: host to the times of its first and its last event of any kind.
        passed_over: number of lines that are not events.
        stints: of the training process.
    """

    events: list[Event] = field(default_factory=list)
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    passed_over: int = 0
    stints: list[Stint] = field(default_factory=list)

    def take(self, event: Event) -> None:
        """The next event; the order in the file is the order in which things happened."""
        first, last = self.spans.get(event.host, (event.time, event.time))
        self.spans[event.host] = (min(first, event.time), max(last, event.time))
        if event.kind in _KEPT:
            self.events.append(event)
        elif event.kind == "sync":
            self.stints.append(Stint(event, array("q"), array("d")))
        elif event.kind == "commit" and self.stints:
            self._commit(event)
        elif event.kind == "durable":
            self._durable(event)
        elif event.kind == "recovered" and self.stints:
            stint = self.stints[-1]
            if event.whole("generation") == stint.place[0]:
                self.stints[-1] = replace(stint, recovered=stint.recovered or event)
        elif event.kind == "reset" and self.stints:
            lost = event.whole("steps") or 0
            self.stints[-1] = replace(self.stints[-1], lost=lost, left=event.time)
        elif event.kind == "finished" and self.stints:
            self.stints[-1] = replace(self.stints[-1], finished=event)

    def _commit(self, event: Event) -> None:
        stint, made = self.stints[-1], event.whole("commit")
        if made is not None:
            stint.numbers.append(made)
            stint.times.append(event.time)

    def _durable(self, event: Event) -> None:
        """Note a durable commit; while it was written, there may have been another rendezvous."""
        generation, made = event.whole("generation"), event.whole("commit")
        stint = next((stint for stint in reversed(self.stints) if stint.place[0] == generation), None)
        if stint is not None and made is not None:
            stint.durable.append(made)
