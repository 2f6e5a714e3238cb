"""The measurements of a drill: stalls, silences, phases of recoveries. All times are in seconds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hvdrecover.drill.advice import Measured, Phases
from hvdrecover.drill.testimony import Testimony
from hvdrecover.reporting import reading, summary
from hvdrecover.reporting.records import Event, Log
from hvdrecover.reporting.summary import REPORTED, Recovery


def measure(clean: Path, told: Testimony, drilled: Sequence[Log], leaving: Sequence[float]) -> Measured:
    """Put together what the runs of a drill tell.

    Args:
        clean: the event files of the undisturbed run.
        told: what its witnesses tell.
        drilled: the events of the runs with faults.
        leaving: how long preempted runs took from SIGTERM to their exit.
    """
    recoveries = [each for log in drilled for each in _recoveries(log)]
    return Measured(
        stall=_median(event.number("stall") for event in _events(clean, "commit")),
        interval=_median(_gaps(line.time for line in told.commits if line.rank == 0)),
        write=_median(event.number("seconds") for event in _events(clean, "durable")),
        in_memory=tuple(phases for source, phases in recoveries if source == "memory"),
        from_durable=tuple(phases for source, phases in recoveries if source == "durable"),
        silence=max(silences(told), default=None),
        leave=max(leaving, default=None),
    )


def longest_stall(folders: Iterable[Path]) -> float | None:
    """The longest stall of training by a commit; None if there was no commit.

    Args:
        folders: the event files of runs.
    """
    stalls = [event.number("stall") or 0.0 for folder in folders for event in _events(folder, "commit")]
    return max(stalls, default=None)


def _recoveries(log: Log) -> Iterator[tuple[str, Phases]]:
    """Return where the state came from, and the phases, of all recoveries."""
    sources = {stint.place[0]: stint.sync.word("source") for stint in log.stints}
    for fault in summary.summarise(log).faults:
        if fault.recovery is not None and fault.recovery.phases:
            yield sources.get(fault.recovery.generation, ""), _phases(fault.recovery)


def _phases(recovery: Recovery) -> Phases:
    """The phases that the slowest rank tells; what came before them was for the fault to be noticed."""
    reported = {name: recovery.phases.get(name, 0.0) for name in REPORTED}
    return Phases(detect=recovery.phases.get("start", 0.0), **reported)


def silences(told: Testimony) -> Iterator[float]:
    """The times between signs of life of each rank, in seconds."""
    for rank in {line.rank for line in told.commits}:
        lines = [*told.steps, *told.batches, *told.commits]
        yield from _gaps(sorted(line.time for line in lines if line.rank == rank))


def _gaps(times: Iterable[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _events(folder: Path, kind: str) -> Iterator[Event]:
    for path in folder.glob("*.jsonl"):
        for line in path.read_text(errors="replace").splitlines():
            event = reading.parse(line)
            if event is not None and event.kind == kind:
                yield event
