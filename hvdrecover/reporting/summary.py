"""A run, as its record describes it: rendezvous, faults, recoveries, commits and storage.

`Run` takes one event after the other, so a run can be followed. `Run.report` draws the conclusions.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hvdrecover.record import Event, whole

REPORTED = ("reset", "rendezvous", "load", "sync", "first_step")  # phases of a recovery that a rank reports
PHASES = ("start", *REPORTED)
"""All phases: the first lasts until the rank sets out to recover. Together they are the whole recovery."""
RECENT = 32  # commits over which the throughput is taken
_TOLERANCE = 1.0  # seconds by which an event may seem to be before its cause, as messages take time


# -- what ranks did ------------------------------------------------------------------------------------


@dataclass
class Stint:
    """The work of one process from one rendezvous to the next.

    Attributes:
        rank: its rank.
        host: its host.
        synced: when it had agreed with the others.
        recovered: its first step, if that followed a recovery.
        finished: when its training function had returned.
        lost: how many steps it rolled back for the next rendezvous.
        left: when it set out for that.
    """

    rank: int
    host: str
    synced: float
    recovered: Event | None = None
    finished: float | None = None
    lost: int = 0
    left: float | None = None


@dataclass
class Rendezvous:
    """Ranks that agreed on a commit to resume from, and their work until the next rendezvous.

    Attributes:
        generation: the generation that it began.
        commit: the commit that it resumed from.
        size: number of ranks.
        source: where the state came from: ``memory``, ``near``, ``durable`` or ``initial``.
        stints: of those ranks that have recorded it; at least one.
        numbers: the commits, in order; each once.
        times: when the first rank had made them, as many.
        durable: the commits that became durable.
    """

    generation: int
    commit: int
    size: int
    source: str
    stints: list[Stint] = field(default_factory=list)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    durable: set[int] = field(default_factory=set)

    @property
    def place(self) -> tuple[int, int, int]:
        """The identity of the rendezvous in the events of its ranks."""
        return self.generation, self.commit, self.size

    @property
    def began(self) -> float:
        """When the first rank had agreed."""
        return min(stint.synced for stint in self.stints)

    @property
    def agreed(self) -> float:
        """When the last rank had agreed."""
        return max(stint.synced for stint in self.stints)

    @property
    def newest(self) -> int:
        """The newest commit, or the one that the rendezvous resumed from."""
        return max(self.commit, self.numbers[-1] if self.numbers else 0)

    @property
    def finished(self) -> bool:
        """Whether the run ended here."""
        return any(stint.finished is not None for stint in self.stints)

    @property
    def first_steps(self) -> list[Event]:
        """The ranks' first steps after the recovery, in order of time."""
        return sorted((each.recovered for each in self.stints if each.recovered), key=lambda each: each.time)

    def stepped(self) -> float | None:
        """Return when all ranks stepped again, or None if they never did.

        A rank without a record of its first step may have lost it with its host. Two commits or the end of
        the run prove it as well: they take all ranks. One commit may precede the first step.
        """
        steps = self.first_steps
        if len(steps) == len(self.stints):
            return steps[-1].time
        proofs = [*self.times[1:2], *(each.finished for each in self.stints if each.finished is not None)]
        if not proofs:
            return None
        return steps[-1].time if steps else min(proofs)

    def trained(self) -> bool:
        """Return whether the ranks got as far as training.

        No rank records a first step after the very first rendezvous, so one commit is enough there.
        """
        return self.stepped() is not None or (self.source == "initial" and len(self.times) > 0)

    def reached(self, commit: int) -> float:
        """Return when a commit was made, or the newest before it; if none was, when the ranks had agreed."""
        place = bisect.bisect_right(self.numbers, commit)
        return self.times[place - 1] if place else self.agreed


# -- conclusions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    """A recovery from a fault.

    Attributes:
        generation: the generation in which all ranks stepped again.
        commit: the commit that they resumed from.
        seconds: from the fault to the last rank's first step.
        rank: the rank that stepped last; None if no rank has recorded its first step.
        phases: how many seconds that rank spent on each of `PHASES`; empty if it has not recorded them.
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
        began: when it began; a hang when its process fell silent.
        kind: crash, hang, out_of_memory, preemption, lost_host, launcher_lost, script_error or early_exit.
        host: the host whose guardian, or supervisor, noticed it.
        rank: the rank that had it; -1 if it had none yet, None if the whole job had the fault.
        exit: the lost process's exit code, negative for a signal, or None.
        steps: steps that the lost process had done since its last commit, or None if that is not known.
        detail: a text.
        recovery: the recovery from it, or None.
        continued: whether no recovery was necessary: the ranks continued without a rendezvous.
    """

    time: float
    began: float
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
    """The end of the run.

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
        generation: its generation.
        number: its number.
    """

    time: float
    generation: int
    number: int


@dataclass(frozen=True)
class Outage:
    """Commits cannot be made durable.

    Attributes:
        since: the first failure, in seconds since the Unix epoch.
        error: the last one.
    """

    since: float
    error: str


@dataclass(frozen=True)
class Report:
    """What there is to say of a run, whether it is over or not. Times are seconds since the Unix epoch.

    Attributes:
        begin: the first ``start``, or the first event if there is none.
        end: the last event.
        activity: ``starting``, ``training``, ``recovering``, ``finished`` or ``ended``, which is before it
            was finished.
        ending: how the run ended, as far as it has.
        starts: how often the whole job was started.
        restarts: how often one process was restarted in place.
        warm: how many of those restarts a standby made.
        given_up: why slots or jobs were given up.
        standbys: how many slots have a standby that is ready.
        faults: in order of time.
        steps_repeated: steps that were done again, as no commit held them.
        commits_repeated: commits that were made again, as the job resumed from an earlier one.
        goodput: share of the time that was spent between commits that were kept, from 0 to 1; None if no time
            has passed.
        machine: host of the newest start, its system and its processors; empty if there was none.
        versions: package to its version on that host.
        agreement: the last rendezvous of the ranks, or None if there was none.
        commit: the newest commit, or the one that the ranks resumed from; None before the first rendezvous.
        epoch: the newest that events name, or None. They name epochs whose last batch is padded or cut.
        commits: number of commits that rank 0 has made, repeated ones included.
        recent: when it made the newest `RECENT` of them, in order.
        durable: the newest durable commit with the time at which its writing began, or None.
        durables: number of commits that have become durable.
        durable_bytes: their size.
        durable_seconds: the time that was spent on writing them.
        write_failures: number of attempts to write that failed.
        outage: why no commits become durable, or None if they do.
        outages: number of outages that have begun.
        outage_seconds: the length of those that are over.
        hosts: those that have recorded anything.
    """

    begin: float
    end: float
    activity: str
    ending: Ending
    starts: int
    restarts: int
    warm: int
    given_up: tuple[str, ...]
    standbys: int
    faults: tuple[Fault, ...]
    steps_repeated: int
    commits_repeated: int
    goodput: float | None
    machine: str
    versions: Mapping[str, str]
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
    hosts: tuple[str, ...]

    @property
    def kinds(self) -> dict[str, Tally]:
        """Kind of fault to what there was of it, the most frequent first."""
        names = [fault.kind for fault in self.faults]
        order = sorted(set(names), key=lambda name: (-names.count(name), name))
        return {name: tally(fault for fault in self.faults if fault.kind == name) for name in order}

    @property
    def overall(self) -> Tally:
        """What there was of all kinds together."""
        return tally(self.faults)

    @property
    def over(self) -> bool:
        """Whether the run is over: its supervisor has left, or there is none and it is finished."""
        if self.ending.outcome == "finished":
            return self.ending.code is not None or not self.starts
        return self.ending.outcome == "ended"

    def rate(self, now: float) -> float | None:
        """Return the commits per second since the oldest of the recent ones; None before there are two."""
        if len(self.recent) < 2:
            return None
        passed = max(now, self.recent[-1]) - self.recent[0]
        return (len(self.recent) - 1) / passed if passed > 0 else None


def tally(faults: Iterable[Fault]) -> Tally:
    """Count faults, and the time to recover from them."""
    all_faults = list(faults)
    seconds = [fault.recovery.seconds for fault in all_faults if fault.recovery is not None]
    median = statistics.median(seconds) if seconds else None
    recovered = len(seconds) + sum(fault.continued for fault in all_faults)
    return Tally(len(all_faults), recovered, median, max(seconds, default=None))


def summarise(events: Iterable[Event]) -> Report:
    """Draw the conclusions from a run's events; there is at least one."""
    return Run(events).report()


# -- from events to conclusions ------------------------------------------------------------------------


class Run:
    """All facts of a run so far; it takes events in the order of the record.

    Weeks of commits take 16 bytes each, and no time when a report is made.

    Args:
        events: the first events.

    Attributes:
        rendezvouses: in order.
        starts: the events ``start``.
        ends: the events ``end``.
        faults: the events ``fault``.
        begin: time of the first event.
        end: time of the last event.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.rendezvouses: list[Rendezvous] = []
        self.starts: list[Event] = []
        self.ends: list[Event] = []
        self.faults: list[Event] = []
        self.begin, self.end = math.inf, -math.inf
        self._joinable = 0  # the first rendezvous that ranks may still join: a new start begins others
        self._stints: dict[tuple[str, int], tuple[Rendezvous, Stint]] = {}  # of each process, the last
        self._restarts: list[Event] = []
        self._given_up: list[str] = []
        self._standbys: dict[tuple[str, int | None], bool] = {}
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._epochs: dict[str, int] = {}
        self._commits = self._durables = self._durable_bytes = 0
        self._durable_seconds = self._outage_seconds = 0.0
        self._write_failures = self._outages = 0
        self._durable: Commit | None = None
        self._outage: Outage | None = None
        self._hosts: set[str] = set()
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take the next event."""
        self.begin, self.end = min(self.begin, event.time), max(self.end, event.time)
        self._hosts.add(event.host)
        generation, commit = event.whole("generation"), event.whole("commit")
        at = self._stints.get((event.host, event.pid))
        match event.kind:
            case "start":
                self.starts.append(event)
                self._joinable = len(self.rendezvouses)
                self._standbys.clear()
            case "end":
                self.ends.append(event)
            case "fault":
                self.faults.append(event)
            case "restart" if event.word("scope") == "slot":
                self._restarts.append(event)
            case "gave_up":
                self._given_up.append(_given_up(event))
            case "standby":
                self._standbys[event.host, event.whole("slot")] = event.facts.get("ready") is True
            case "sync":
                self._join(event, generation or 0, commit or 0)
            case "commit" if commit is not None:
                self._committed(event, commit, at)
            case "recovered" if at is not None and generation == at[0].generation:
                at[1].recovered = at[1].recovered or event
            case "reset" if at is not None:
                at[1].lost, at[1].left = event.whole("steps") or 0, event.time
            case "finished" if at is not None:
                at[1].finished = event.time
            case "tail" if (epoch := event.whole("epoch")) is not None:
                self._epochs[event.word("sampler")] = epoch
            case "durable" | "write_failed" | "outage" | "outage_over":
                self._stored(event, generation, commit)

    def _join(self, event: Event, generation: int, commit: int) -> None:
        """Let a rank join a rendezvous: ranks that name the same place, each once, are together."""
        place = generation, commit, event.whole("size") or 0
        same = (each for each in reversed(self.rendezvouses[self._joinable :]) if each.place == place)
        rendezvous = next(same, None)
        if rendezvous is None or any(stint.rank == event.rank for stint in rendezvous.stints):
            rendezvous = Rendezvous(*place, event.word("source"))
            self.rendezvouses.append(rendezvous)
        stint = Stint(event.rank, event.host, event.time)
        rendezvous.stints.append(stint)
        self._stints[event.host, event.pid] = rendezvous, stint

    def _committed(self, event: Event, commit: int, at: tuple[Rendezvous, Stint] | None) -> None:
        if event.rank == 0:
            self._commits += 1
            self._recent.append(event.time)
        if at is not None and (not at[0].numbers or commit > at[0].numbers[-1]):
            at[0].numbers.append(commit)
            at[0].times.append(event.time)

    def _stored(self, event: Event, generation: int | None, commit: int | None) -> None:
        error = event.word("error")
        match event.kind:
            case "durable" if generation is not None and commit is not None:
                seconds = max(event.number("seconds") or 0.0, 0.0)
                self._durable = Commit(event.time - seconds, generation, commit)
                self._durables += 1
                self._durable_bytes += max(event.whole("bytes") or 0, 0)
                self._durable_seconds += seconds
                self._outage = None
                # While the commit was written, there may have been another rendezvous.
                for rendezvous in reversed(self.rendezvouses):
                    if rendezvous.generation == generation:
                        rendezvous.durable.add(commit)
                        break
            case "write_failed" if generation is not None and commit is not None:
                self._write_failures += 1
                self._outage = Outage(self._outage.since if self._outage else event.time, error)
            case "outage":
                self._outages += 1
                self._outage = Outage(self._outage.since if self._outage else event.time, error)
            case "outage_over":
                self._outage_seconds += max(event.number("seconds") or 0.0, 0.0)
                self._outage = None

    def report(self) -> Report:
        """Return what there is to say of the run; it has at least one event."""
        begin = min((start.time for start in self.starts), default=self.begin)
        faults, ending = tuple(map(self._fault, self.faults)), self._ending()
        last = self.rendezvouses[-1] if self.rendezvouses else None
        agreement = Agreement(last.agreed, *last.place) if last else None
        newest = Commit(last.reached(last.newest), last.generation, last.newest) if last else None
        start = self.starts[-1] if self.starts else None
        return Report(
            begin=begin,
            end=self.end,
            activity=self._activity(faults, ending),
            ending=ending,
            starts=len(self.starts),
            restarts=len(self._restarts),
            warm=sum(event.facts.get("warm") is True for event in self._restarts),
            given_up=tuple(self._given_up),
            standbys=sum(self._standbys.values()),
            faults=tuple(sorted(faults, key=lambda fault: fault.time)),
            steps_repeated=self._steps_repeated(),
            commits_repeated=self._commits_repeated(),
            goodput=min(self._kept_seconds() / (self.end - begin), 1.0) if self.end > begin else None,
            machine=", ".join(filter(None, (start.host, start.word("machine")))) if start else "",
            versions=_versions(start) if start else {},
            agreement=agreement,
            commit=newest,
            epoch=max(self._epochs.values(), default=None),
            commits=self._commits,
            recent=tuple(sorted(self._recent)),
            durable=self._durable,
            durables=self._durables,
            durable_bytes=self._durable_bytes,
            durable_seconds=self._durable_seconds,
            write_failures=self._write_failures,
            outage=self._outage,
            outages=self._outages,
            outage_seconds=self._outage_seconds,
            hosts=tuple(sorted(self._hosts)),
        )

    def broken_by(self, fault: Event) -> int:
        """Return the place of the rendezvous that a fault broke; -1 if it came before the first.

        The commit of the lost process tells it. Without one, it is the last in which all had agreed by then.
        """
        since, commit = began(fault), fault.facts.get("commit")
        generation = whole(commit[0]) if isinstance(commit, list) and commit else None
        places = range(len(self.rendezvouses) - 1, -1, -1)
        for place in places:
            rendezvous = self.rendezvouses[place]
            if rendezvous.generation == generation and rendezvous.began <= since + _TOLERANCE:
                return place
        return next((place for place in places if self.rendezvouses[place].agreed <= since), -1)

    def _fault(self, event: Event) -> Fault:
        broken = self.broken_by(event)
        since, recovery = began(event), None
        for rendezvous in self.rendezvouses[broken + 1 :]:
            if (stepped := rendezvous.stepped()) is not None:
                recovery = _recovery(rendezvous, max(stepped - since, 0.0))
                break
        return Fault(
            time=event.time,
            began=since,
            kind=event.word("fault") or "unknown",
            host=event.host,
            rank=None if event.whole("slot") is None else event.rank,
            exit=event.whole("exit"),
            steps=event.whole("steps"),
            detail=event.word("detail"),
            recovery=recovery,
            continued=recovery is None and broken >= 0 and self._continued(event, self.rendezvouses[broken]),
        )

    def _continued(self, fault: Event, rendezvous: Rendezvous) -> bool:
        """Return whether all ranks trained on after a fault: without one, the others commit once at most."""
        if any(each.finished is not None and each.finished > fault.time for each in rendezvous.stints):
            return True
        return len(rendezvous.times) - bisect.bisect_right(rendezvous.times, fault.time) > 1

    def _steps_repeated(self) -> int:
        """All ranks train in step, so of each rendezvous the rank that lost the most steps counts for all."""
        places = enumerate(self.rendezvouses)
        lost = {place: max(stint.lost for stint in each.stints) for place, each in places}
        for fault in self.faults:
            place = self.broken_by(fault)
            lost[place] = max(lost.get(place, 0), fault.whole("steps") or 0)
        return sum(lost.values())

    def _commits_repeated(self) -> int:
        pairs = itertools.pairwise(self.rendezvouses)
        return sum(max(old.newest - new.commit, 0) for old, new in pairs if not old.finished)

    def _kept_seconds(self) -> float:
        """Sum the time from each agreement to the last commit after it that no later rendezvous lost."""
        seconds = 0.0
        kept: float = math.inf  # commits beyond this one were lost later on
        for rendezvous in reversed(self.rendezvouses):
            if rendezvous.finished:
                kept = math.inf
            newest = int(min(rendezvous.newest, kept))
            seconds += max(rendezvous.reached(newest) - rendezvous.agreed, 0.0)
            kept = min(kept, rendezvous.commit)
        return seconds

    def _ending(self) -> Ending:
        started = self.starts[-1].time if self.starts else -math.inf
        left = self.ends[-1] if self.ends and self.ends[-1].time >= started else None
        code, reason = (left.whole("code"), left.word("reason")) if left else (None, "")
        # A script can fail after its training function has returned, such as in a second training function.
        if self.rendezvouses and self.rendezvouses[-1].finished and code in (None, 0):
            return Ending("finished", code, reason)
        return Ending("ended" if left else "open", code, reason)

    def _activity(self, faults: Sequence[Fault], ending: Ending) -> str:
        if ending.outcome != "open":
            return ending.outcome
        if self._joinable >= len(self.rendezvouses):
            return "starting"
        recovered = not faults or faults[-1].recovery is not None or faults[-1].continued
        return "training" if recovered else "recovering"


def began(fault: Event) -> float:
    """Return when a fault began. A hang is noticed only when its process has been silent for long."""
    silent = fault.number("silent") if fault.word("fault") == "hang" else None
    return fault.time - max(silent or 0.0, 0.0)


def phases(recovered: Event) -> dict[str, float]:
    """Return how many seconds a rank spent on each of the phases that it reports."""
    found = {phase: recovered.number(phase) for phase in REPORTED}
    return {phase: seconds for phase, seconds in found.items() if seconds is not None}


def _recovery(rendezvous: Rendezvous, seconds: float) -> Recovery:
    steps = rendezvous.first_steps
    spent = phases(steps[-1]) if steps else {}
    if spent:
        spent = {"start": max(seconds - sum(spent.values()), 0.0), **spent}
    rank = steps[-1].rank if steps else None
    return Recovery(rendezvous.generation, rendezvous.commit, seconds, rank, spent)


def _versions(start: Event) -> dict[str, str]:
    found = start.facts.get("versions")
    known = found if isinstance(found, dict) else {}
    return {package: version for package, version in known.items() if isinstance(version, str)}


def _given_up(event: Event) -> str:
    rank = f"rank {event.rank}" if event.rank >= 0 else "a process without a rank"
    what = f"{rank} on {event.host}" if event.word("scope") == "slot" else "the job"
    return f"{what}: {event.word('reason')}"
