"""The status of a run that is under way."""

from __future__ import annotations

from dataclasses import dataclass

from hvdrecover.reporting.summary import Ending, Fault

RECENT = 32  # commits, over which the throughput is taken


@dataclass(frozen=True)
class Agreement:
    """The last agreement of the ranks.

    Attributes:
        time: when, in seconds since the Unix epoch.
        generation: the generation that began.
        commit: the commit that it resumed from.
        ranks: their number.
    """

    time: float
    generation: int
    commit: int
    ranks: int


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        time: when it was made, in seconds since the Unix epoch.
        generation: the generation.
        number: its number.
    """

    time: float
    generation: int
    number: int


@dataclass(frozen=True)
class Outage:
    """Durable commits can't be made.

    Attributes:
        since: the first failure, in seconds since the Unix epoch.
        error: the last one.
    """

    since: float
    error: str


@dataclass(frozen=True)
class Status:
    """The state of a run. Times are seconds since the Unix epoch, corrected for wrong clocks of hosts.

    Attributes:
        begin: the first ``start``, or the first event if there is none.
        last: the last event.
        activity: ``starting``, ``training``, ``recovering``, ``finished`` or ``ended``, which is before it
            was finished.
        ending: how the run ended, as far as it has.
        starts: how often the whole job was started.
        restarts: how often one process was restarted in place.
        warm: how many of those restarts a standby made.
        given_up: why slots or jobs were given up.
        standbys: how many slots have one that is ready.
        agreement: the last rendezvous of the ranks, or None if there was none.
        commit: the newest commit, or the one that the ranks resumed from; None before the first rendezvous.
        epoch: the newest that events name, or None. They name those whose last batch is padded or cut.
        commits: number of commits that rank 0 has made, repeated ones included.
        recent: when it made the newest `RECENT` of them, in order.
        durable: the newest durable commit with the time at which its writing began, or None.
        durables: number of commits that have become durable.
        durable_bytes: their size.
        durable_seconds: the time that was spent writing them.
        write_failures: number of attempts to write that failed.
        outage: why no commits become durable, or None if they do.
        outages: number of outages that have begun.
        outage_seconds: the length of those that are over.
        faults: in order of time, with their recoveries.
        steps_repeated: steps that were done again, as they had not been committed.
        hosts: those that have told of anything.
        passed_over: number of lines that are not events.
    """

    begin: float
    last: float
    activity: str
    ending: Ending
    starts: int
    restarts: int
    warm: int
    given_up: tuple[str, ...]
    standbys: int
    agreement: Agreement | None
    commit: Commit | None
    epoch: int | None
    commits: int
    recent: tuple[float, ...]
    durable: Commit | None
    durables: int
    durable_bytes: int
    durable_seconds: float
    write_failures: int
    outage: Outage | None
    outages: int
    outage_seconds: float
    faults: tuple[Fault, ...]
    steps_repeated: int
    hosts: tuple[str, ...]
    passed_over: int

    @property
    def over(self) -> bool:
        """Return whether the run is over: its supervisor has left, or there is none and it is finished."""
        if self.ending.outcome == "finished":
            return self.ending.code is not None or not self.starts
        return self.ending.outcome == "ended"

    def rate(self, now: float) -> float | None:
        """Commits per second since the oldest of the recent ones; None before there are two."""
        if len(self.recent) < 2:
            return None
        passed = max(now, self.recent[-1]) - self.recent[0]
        return (len(self.recent) - 1) / passed if passed > 0 else None
