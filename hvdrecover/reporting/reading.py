"""Finding a run's event files, and reading them; also while processes append to them."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdrecover.errors import ConfigError
from hvdrecover.reporting.records import Event, Log, Stint, number, whole

_PATTERN = "*.jsonl"
_END_OF_TIME = 250_000_000_000  # the year 9892; a clock tells no later time, and calendars end soon after
_KEPT = frozenset({"start", "end", "fault", "restart", "gave_up"})  # of the others only the time counts


def locate(folder: Path | None, configured: Path | None, runs: Path) -> Path:
    """The folder of the run to report on.

    Args:
        folder: the one that was asked for, or None.
        configured: the one that ``HVDRECOVER_EVENTS`` names, or None.
        runs: where the folders of runs are; the one in which an event was written last is taken.

    Raises:
        ConfigError: there is no such folder, or it could not be searched for.
    """
    for name, wanted in (("FOLDER", folder), ("HVDRECOVER_EVENTS", configured)):
        if wanted is None:
            continue
        if not wanted.is_dir():
            raise ConfigError(
                name, f"'{wanted}' is not a folder; name the one that holds the run's event files"
            )
        return wanted
    try:
        written = {run: _last_written(run) for run in runs.iterdir() if run.is_dir()} if runs.is_dir() else {}
    except OSError as error:
        raise ConfigError("FOLDER", f"'{runs}' could not be searched for the newest run: {error}") from error
    newest = max(written, key=lambda run: (written[run], run), default=None)
    if newest is None or not written[newest]:
        raise ConfigError(
            "FOLDER",
            f"no run to report on: neither a folder nor HVDRECOVER_EVENTS is given, and '{runs}' holds no "
            "run's events; name the folder that holds a run's event files",
        )
    return newest


def read(folder: Path) -> Log:
    """Read the event files in a folder and in those below it.

    Lines that are not events are passed over: a process that is killed leaves its last one half-written.

    Raises:
        ConfigError: a file could not be read, or there are no events at all.
    """
    try:
        processes = [_process(path) for path in sorted(folder.rglob(_PATTERN))]
    except OSError as error:
        raise ConfigError("FOLDER", f"'{folder}' could not be read: {error}") from error
    if not any(process.spans for process in processes):
        raise ConfigError(
            "FOLDER",
            f"'{folder}' holds no events; events are written to {_PATTERN} files in the folder that "
            "HVDRECOVER_EVENTS named when the run was started",
        )
    spans: dict[str, tuple[float, float]] = {}
    for process in processes:
        for host, (first, last) in process.spans.items():
            begin, end = spans.get(host, (first, last))
            spans[host] = (min(begin, first), max(end, last))
    return Log(
        events=tuple(sorted((e for process in processes for e in process.events), key=lambda e: e.time)),
        stints=tuple(stint for process in processes for stint in process.stints),
        spans=spans,
        files=len(processes),
        passed_over=sum(process.passed_over for process in processes),
    )


def _last_written(run: Path) -> float:
    """Return when an event file of a run was last written to; 0 if there is none."""
    return max((path.stat().st_mtime for path in run.rglob(_PATTERN)), default=0.0)


def parse(line: str) -> Event | None:
    """The event that a line holds; None if it holds none."""
    try:
        return _event(json.loads(line))
    except (ValueError, RecursionError):
        return None


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


def _process(path: Path) -> Process:
    process = Process()
    for event in _events(path):
        if event is None:
            process.passed_over += 1
        else:
            process.take(event)
    return process


def _events(path: Path) -> Iterator[Event | None]:
    """The lines of a file; None for those that are not events."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            yield parse(line)


def _event(facts: object) -> Event | None:
    if not isinstance(facts, dict):
        return None
    time, kind, host = number(facts.get("time")), facts.get("kind"), facts.get("host")
    if time is None or not 0 <= time < _END_OF_TIME:
        return None
    if not isinstance(kind, str) or not isinstance(host, str):
        return None
    return Event(time, kind, host, whole(facts.get("rank")) or 0, facts)
