"""The clocks of hosts, set against each other by what their ranks did at the same time.

Ranks train in step: each makes its first step after a rendezvous, and its commits, at nearly the same time as
the others. If a host tells other times for all of these than another host does, by more than a second, its
clock is wrong. Smaller differences are left alone, as they may as well come from slower ranks.
"""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace

from hvdrecover.record import Event
from hvdrecover.reporting.records import Log, Stint

TOLERANCE = 1.0  # seconds
COMMITS = 16  # of each stint are compared, which is enough for a median

Mark = tuple[object, ...]
"""The name of a moment: the rendezvous, and what happened after it."""


def offsets(log: Log) -> dict[str, float]:
    """Return how far ahead of the others the clocks of hosts are, in seconds; below 0 for those behind.

    Returns:
        Host to offset, for the hosts whose clocks are wrong. The clock to compare with is that of the host on
        which the job was started first, if it trains, else that of the host that shares the most moments with
        others. One that shares none is taken to be right.
    """
    marks = _marks(log)
    hosts = {host for told in marks.values() for host in told}
    if len(hosts) < 2:
        return {}
    starter = next((event.host for event in log.of("start")), None)
    shared = {host: sum(host in told and len(told) > 1 for told in marks.values()) for host in sorted(hosts)}
    reference = starter if starter in hosts else max(shared, key=lambda host: shared[host])
    known = {str(reference): 0.0}
    while found := {host: _offset(host, known, marks) for host in sorted(hosts - set(known))}:
        settled = {host: offset for host, offset in found.items() if offset is not None}
        if not settled:
            break
        known.update(settled)
    return {host: offset for host, offset in sorted(known.items()) if offset}


def corrected(log: Log, offsets: Mapping[str, float]) -> Log:
    """The same log with the times of the hosts whose clocks are wrong put right."""
    return retimed(log, lambda host, time: time - offsets.get(host, 0.0)) if offsets else log


def retimed(log: Log, right: Callable[[str, float], float]) -> Log:
    """The same log with other times.

    Args:
        log: the log.
        right: takes a host and a time that it tells, and gives the time to put in its place.
    """

    def event(old: Event) -> Event:
        return replace(old, time=right(old.host, old.time))

    def stint(old: Stint) -> Stint:
        host = old.sync.host
        return replace(
            old,
            sync=event(old.sync),
            times=array("d", (right(host, time) for time in old.times)),
            recovered=old.recovered and event(old.recovered),
            finished=old.finished and event(old.finished),
            left=None if old.left is None else right(host, old.left),
        )

    return replace(
        log,
        events=tuple(sorted(map(event, log.events), key=lambda each: each.time)),
        stints=tuple(map(stint, log.stints)),
        spans={host: (right(host, first), right(host, last)) for host, (first, last) in log.spans.items()},
    )


def _marks(log: Log) -> dict[Mark, dict[str, float]]:
    """Moment to host to the time there, for the moments that can't be mistaken for others."""
    marks: dict[Mark, dict[str, float]] = {}
    seen: set[tuple[Mark, int]] = set()
    repeated: set[Mark] = set()  # a job that starts anew may count from the same generation again
    for stint in log.stints:
        for mark, time in _moments(stint):
            if (mark, stint.sync.rank) in seen:
                repeated.add(mark)
            seen.add((mark, stint.sync.rank))
            marks.setdefault(mark, {}).setdefault(stint.sync.host, time)
    return {mark: told for mark, told in marks.items() if mark not in repeated}


def _moments(stint: Stint) -> list[tuple[Mark, float]]:
    moments: list[tuple[Mark, float]] = [((*stint.place, "sync"), stint.sync.time)]
    if stint.recovered is not None:
        moments.append(((*stint.place, "recovered"), stint.recovered.time))
    commits = zip(stint.numbers[:COMMITS], stint.times[:COMMITS], strict=True)
    return moments + [((*stint.place, commit), time) for commit, time in commits]


def _offset(host: str, known: Mapping[str, float], marks: Mapping[Mark, Mapping[str, float]]) -> float | None:
    """Return how far a host's clock is ahead of those that are known; None if they share no moment."""
    ahead = [
        told[host] - (told[other] - known[other])
        for told in marks.values()
        if host in told
        for other in told
        if other in known
    ]
    if not ahead:
        return None
    # A rank that is slow to load or to evaluate is late at some moments; a clock is wrong at all of them.
    wrong = min(ahead) > TOLERANCE or max(ahead) < -TOLERANCE
    return statistics.median(ahead) if wrong else 0.0
