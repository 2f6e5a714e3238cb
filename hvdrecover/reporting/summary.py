"""A summary of a run's events: faults, the time to recover from them, and what was done twice."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.record import Event
from hvdrecover.reporting.clocks import corrected, offsets
from hvdrecover.reporting.records import Log
from hvdrecover.reporting.rendezvous import Rendezvous, began, broken_by, group

REPORTED = ("reset", "rendezvous", "load", "sync", "first_step")  # phases that a rank reports
PHASES = ("start", *REPORTED)
"""All phases: the first is what passes until the rank sets out to recover; they add up to the whole."""


@dataclass(frozen=True)
class Recovery:
    """The way in which all ranks came to step again.

    Attributes:
        generation: the generation in which they did.
        commit: the commit that they resumed from.
        seconds: from the fault to the last rank's first step.
        rank: the rank that stepped last; None if no rank tells of its first step.
        phases: how many seconds that rank spent on each of `PHASES`; empty if it does not tell.
    """

    generation: int
    commit: int
    seconds: float
    rank: int | None
    phases: Mapping[str, float]


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        time: when it was noticed, in seconds since the Unix epoch.
        kind: crash, hang, out_of_memory, preemption, lost_host, launcher_lost, script_error or early_exit.
        host: the host of whoever noticed it.
        rank: the rank that had it; -1 if it had none yet, None if the whole job had the fault.
        exit: the lost process's exit code, negative for a signal, or None.
        steps: steps that the lost process had done since its last commit, or None if that is not known.
        detail: a text.
        recovery: how it was recovered from, or None if it has not been.
        continued: whether there was nothing to recover from, as the ranks continued without a rendezvous.
    """

    time: float
    kind: str
    host: str
    rank: int | None
    exit: int | None
    steps: int | None
    detail: str
    recovery: Recovery | None
    continued: bool = False


@dataclass(frozen=True)
class Tally:
    """The faults of one kind.

    Attributes:
        count: number of faults.
        recovered: number of those that were recovered from, or after which training continued.
        median: seconds to recover, or None if there was no recovery.
        worst: the same, of the slowest recovery.
    """

    count: int
    recovered: int
    median: float | None
    worst: float | None


@dataclass(frozen=True)
class Ending:
    """The end of the run, as far as it has ended.

    Attributes:
        outcome: ``finished``, if the training function returned on all ranks; ``ended``, if the supervisor
            left otherwise; ``open``, if the run is under way or everything was killed.
        code: the supervisor's exit code, if it left.
        reason: why it left.
    """

    outcome: str
    code: int | None
    reason: str


@dataclass(frozen=True)
class Report:
    """A summary of a run's events.

    Attributes:
        begin: the first ``start``, or the first event if there is none, in seconds since the Unix epoch.
        end: the last event.
        ending: how the run ended.
        starts: how often the whole job was started.
        restarts: how often one process was restarted in place.
        warm: how many of those restarts a standby made.
        given_up: why slots or jobs were given up.
        faults: in order of time.
        steps_repeated: steps that were done again, as they had not been committed.
        commits_repeated: commits that were made again, as the job resumed from an earlier one.
        machine: the host of the newest start, its system and its processors; empty if there was none.
        versions: package to its version on that host.
        goodput: the share of the time that was spent between commits that were carried over, from 0 to 1;
            None if no time has passed.
        clocks: host to how many seconds its clock is ahead; its times are corrected.
        files: number of event files.
        passed_over: number of lines in them that are not events.
    """

    begin: float
    end: float
    ending: Ending
    starts: int
    restarts: int
    warm: int
    given_up: tuple[str, ...]
    faults: tuple[Fault, ...]
    steps_repeated: int
    commits_repeated: int
    machine: str
    versions: Mapping[str, str]
    goodput: float | None
    clocks: Mapping[str, float]
    files: int
    passed_over: int

    @property
    def kinds(self) -> dict[str, Tally]:
        """Kind of fault to what there was of it, the most frequent first."""
        names = [fault.kind for fault in self.faults]
        order = sorted(set(names), key=lambda name: (-names.count(name), name))
        return {name: tally(fault for fault in self.faults if fault.kind == name) for name in order}

    @property
    def overall(self) -> Tally:
        """Return what there was of all kinds together."""
        return tally(self.faults)


def tally(faults: Iterable[Fault]) -> Tally:
    """Count faults, and the time to recover from them."""
    all_faults = list(faults)
    seconds = [fault.recovery.seconds for fault in all_faults if fault.recovery is not None]
    median = statistics.median(seconds) if seconds else None
    recovered = len(seconds) + sum(fault.continued for fault in all_faults)
    return Tally(len(all_faults), recovered, median, max(seconds, default=None))


def summarise(log: Log) -> Report:
    """Draw the conclusions from a run's events."""
    wrong = offsets(log)
    log = corrected(log, wrong)
    rendezvouses = group(log.stints)
    starts, faults = log.of("start"), log.of("fault")
    restarts = [event for event in log.of("restart") if event.word("scope") == "slot"]
    begin, end = log.begin, log.end
    return Report(
        begin=begin,
        end=end,
        ending=_ending(log, rendezvouses),
        starts=len(starts),
        restarts=len(restarts),
        warm=sum(event.facts.get("warm") is True for event in restarts),
        given_up=tuple(_given_up(event) for event in log.of("gave_up")),
        faults=tuple(_fault(event, rendezvouses) for event in faults),
        steps_repeated=_steps_repeated(faults, rendezvouses),
        commits_repeated=_commits_repeated(rendezvouses),
        machine=_machine(starts[-1]) if starts else "",
        versions=_versions(starts[-1]) if starts else {},
        goodput=min(_carried_over(rendezvouses) / (end - begin), 1.0) if end > begin else None,
        clocks=wrong,
        files=log.files,
        passed_over=log.passed_over,
    )


def _fault(event: Event, rendezvouses: Sequence[Rendezvous]) -> Fault:
    recovery = _recovery(event, rendezvouses)
    return Fault(
        time=event.time,
        kind=event.word("fault") or "unknown",
        host=event.host,
        rank=None if event.whole("slot") is None else event.rank,
        exit=event.whole("exit"),
        steps=event.whole("steps"),
        detail=event.word("detail"),
        recovery=recovery,
        continued=recovery is None and _continued(event, rendezvouses),
    )


def _recovery(fault: Event, rendezvouses: Sequence[Rendezvous]) -> Recovery | None:
    """The first rendezvous after a fault in which all ranks stepped again."""
    since = began(fault)
    for rendezvous in rendezvouses[broken_by(fault, rendezvouses) + 1 :]:
        stepped = rendezvous.stepped()
        if stepped is not None:
            return _recovered(rendezvous, max(stepped - since, 0.0))
    return None


def _continued(fault: Event, rendezvouses: Sequence[Rendezvous]) -> bool:
    """Return whether all ranks trained on after a fault; if one is lost, the others commit once at most."""
    if (place := broken_by(fault, rendezvouses)) < 0:
        return False
    stints = rendezvouses[place].stints
    if any(stint.finished is not None and stint.finished.time > fault.time for stint in stints):
        return True
    return any(sum(time > fault.time for time in stint.times) > 1 for stint in stints)


def _recovered(rendezvous: Rendezvous, seconds: float) -> Recovery:
    steps = rendezvous.first_steps
    if not steps:
        return Recovery(rendezvous.generation, rendezvous.commit, seconds, None, {})
    reported = {phase: steps[-1].number(phase) for phase in REPORTED}
    phases = {phase: spent for phase, spent in reported.items() if spent is not None}
    if phases:
        phases = {"start": max(seconds - sum(phases.values()), 0.0), **phases}
    return Recovery(rendezvous.generation, rendezvous.commit, seconds, steps[-1].rank, phases)


def _steps_repeated(faults: Sequence[Event], rendezvouses: Sequence[Rendezvous]) -> int:
    """All ranks train in step, so of each rendezvous the rank that lost the most steps counts for all."""
    lost = {place: rendezvous.steps_lost for place, rendezvous in enumerate(rendezvouses)}
    for fault in faults:
        place = broken_by(fault, rendezvouses)
        lost[place] = max(lost.get(place, 0), fault.whole("steps") or 0)
    return sum(lost.values())


def _commits_repeated(rendezvouses: Sequence[Rendezvous]) -> int:
    return sum(
        max(before.newest - after.commit, 0)
        for before, after in itertools.pairwise(rendezvouses)
        if not before.finished
    )


def _carried_over(rendezvouses: Sequence[Rendezvous]) -> float:
    """Seconds from each agreement to the last commit after it that all later rendezvous resumed from."""
    seconds = 0.0
    carried: float = math.inf  # commits beyond this one were lost later on
    for rendezvous in reversed(rendezvouses):
        if rendezvous.finished:
            carried = math.inf
        newest = int(min(rendezvous.newest, carried))
        seconds += max(rendezvous.reached(newest) - rendezvous.agreed, 0.0)
        carried = min(carried, rendezvous.commit)
    return seconds


def _ending(log: Log, rendezvouses: Sequence[Rendezvous]) -> Ending:
    last = next(iter(log.of("end")[-1:]), None)
    started = max((event.time for event in log.of("start")), default=-math.inf)
    left = last if last is not None and last.time >= started else None
    code, reason = (left.whole("code"), left.word("reason")) if left else (None, "")
    # A script can fail after its training function has returned, for example in a second training function.
    if rendezvouses and rendezvouses[-1].finished and code in (None, 0):
        return Ending("finished", code, reason)
    return Ending("ended" if left else "open", code, reason)


def _machine(start: Event) -> str:
    return ", ".join(filter(None, (start.host, start.word("machine"))))


def _versions(start: Event) -> dict[str, str]:
    found = start.facts.get("versions")
    known = found if isinstance(found, dict) else {}
    return {package: version for package, version in known.items() if isinstance(version, str)}


def _given_up(event: Event) -> str:
    rank = f"rank {event.rank}" if event.rank >= 0 else "a process without a rank"
    what = f"{rank} on {event.host}" if event.word("scope") == "slot" else "the job"
    return f"{what}: {event.word('reason')}"
