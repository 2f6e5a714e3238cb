"""A run as its record describes it; times are in seconds since the Unix epoch."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hvdrecover.events import Event, whole

REPORTED = ("reset", "rendezvous", "load", "sync", "first_step")  # phases of a recovery that a rank reports
PHASES = ("start", *REPORTED)
"""All phases: the first lasts until the rank sets out to recover. Together they are the whole recovery."""
_TOLERANCE = 1.0  # seconds by which an event may seem to be before its cause, as messages take time


# -- what ranks did ------------------------------------------------------------------------------------


@dataclass
class Stint:
    """The work of one process from one rendezvous to the next."""

    rank: int
    host: str
    synced: float  # when it had agreed with the others
    recovered: Event | None = None  # its first step, if that followed a recovery
    finished: float | None = None  # when its training function had returned
    lost: int = 0  # steps that it rolled back for the next rendezvous
    left: float | None = None  # when it set out for that rendezvous


@dataclass
class Rendezvous:
    """Ranks that agreed on a commit to resume from, and their work until the next rendezvous."""

    generation: int
    commit: int  # the commit that it resumed from
    size: int  # number of ranks
    source: str  # where the state came from: memory, near, durable or initial
    stints: list[Stint] = field(default_factory=list)  # of those ranks that have recorded it; at least one
    # Weeks of commits take 16 bytes each: the numbers in order, and when the first rank had made each.
    numbers: array[int] = field(default_factory=lambda: array("q"))
    times: array[float] = field(default_factory=lambda: array("d"))
    durable: set[int] = field(default_factory=set)  # commits that became durable

    @property
    def began(self) -> float:
        return min(stint.synced for stint in self.stints)

    @property
    def agreed(self) -> float:
        return max(stint.synced for stint in self.stints)

    @property
    def newest(self) -> int:
        return max(self.commit, self.numbers[-1] if self.numbers else 0)

    @property
    def ends(self) -> list[float]:
        """When training functions returned; not empty if the run ended in this rendezvous."""
        return [each.finished for each in self.stints if each.finished is not None]

    @property
    def first_steps(self) -> list[Event]:
        """The ranks' first steps after the recovery, in order of time."""
        return sorted((each.recovered for each in self.stints if each.recovered), key=lambda each: each.time)

    def stepped(self) -> float | None:
        """Return when all ranks stepped again, or None if they never did."""
        # The record of a first step may be lost with its host. The end of the run proves the step, too. So do
        # two commits; one alone may precede the step.
        steps, proofs = self.first_steps, [*self.times[1:2], *self.ends]
        if len(steps) == len(self.stints) or (steps and proofs):
            return steps[-1].time
        return min(proofs, default=None)

    def trained(self) -> bool:
        """Return whether the ranks trained; no rank records a first step after the very first rendezvous."""
        return self.stepped() is not None or (self.source == "initial" and len(self.times) > 0)

    def reached(self, commit: int) -> float:
        """Return when a commit was made, or the newest before it; if none was, when the ranks had agreed."""
        place = bisect.bisect_right(self.numbers, commit)
        return self.times[place - 1] if place else self.agreed


# -- conclusions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recovery:
    generation: int  # in which all ranks stepped again
    commit: int  # that they resumed from
    seconds: float  # from the fault to the last rank's first step
    rank: int | None  # that stepped last; None if no rank has recorded its first step
    phases: Mapping[str, float]  # seconds of that rank in each of `PHASES`; empty if it recorded none


@dataclass(frozen=True)
class Fault:
    time: float  # when it was noticed
    began: float  # when it began; a hang when its process fell silent
    kind: str  # as in docs/events.md
    host: str  # of the guardian, or supervisor, that noticed it
    rank: int | None  # -1 if the process had none yet, None if the whole job had the fault
    exit: int | None  # the lost process's exit code, negative for a signal
    steps: int | None  # that the lost process had done since its last commit, if known
    detail: str
    recovery: Recovery | None
    continued: bool = False  # whether the ranks trained on without a rendezvous

    @property
    def recovered(self) -> bool:
        return self.recovery is not None or self.continued


@dataclass(frozen=True)
class Tally:
    """The faults of one kind; ``median`` and ``worst`` are seconds to recover, None without a recovery."""

    count: int
    recovered: int  # faults that were recovered from, or after which training continued
    median: float | None
    worst: float | None

    @classmethod
    def of(cls, results: Sequence[tuple[bool, float | None]]) -> Tally:
        """Tally faults: whether each was recovered from, and the seconds to recover, if any."""
        seconds = [each for _, each in results if each is not None]
        median = statistics.median(seconds) if seconds else None
        return cls(len(results), sum(each for each, _ in results), median, max(seconds, default=None))


@dataclass(frozen=True)
class Commit:
    """A commit, and when it was made; for a durable commit, when its writing began."""

    time: float
    generation: int
    number: int


@dataclass(frozen=True)
class Outage:
    """Commits cannot be made durable."""

    since: float  # the first failure
    error: str  # the last one


@dataclass
class Storage:
    durable: Commit | None = None  # the newest
    commits: int = 0  # number of commits that have become durable
    bytes: int = 0
    seconds: float = 0.0  # spent on writing them
    failures: int = 0  # attempts to write that failed
    outage: Outage | None = None  # the outage under way
    outages: int = 0  # that have begun
    outage_seconds: float = 0.0  # of the outages that are over


@dataclass(frozen=True, kw_only=True)
class Report:
    """All conclusions from a run's events: the text, the page, the metrics and the JSON show them."""

    begin: float  # the first `start`, or the first event if there is none
    end: float  # the last event
    activity: str  # starting, training, recovering, finished, or ended (before it was finished)
    outcome: str  # "finished"; "ended" if the supervisor left before; "open" if neither is known
    code: int | None  # the supervisor's exit code, if it left
    reason: str  # why it left
    machine: str  # host of the newest start, its system and its processors; may be empty
    versions: Mapping[str, str]  # of packages on that host
    hosts: tuple[str, ...]  # that have recorded anything
    starts: int  # of the whole job
    restarts: int  # of one process in place
    warm_restarts: int  # those that a standby made
    standbys: int  # slots whose standby is ready
    given_up: tuple[str, ...]  # why slots or jobs were given up
    ranks: int | None  # of the last rendezvous
    commit: Commit | None  # the newest, or the one that the ranks resumed from
    commits: int  # that the job has made, those made again included
    goodput: float | None  # share of the time between commits that were kept; None if no time has passed
    steps_repeated: int  # steps that were done again, as no commit held them
    commits_repeated: int  # commits that were made again, as the job resumed from an earlier one
    storage: Storage
    kinds: Mapping[str, Tally]  # of faults, the most frequent first
    faults: tuple[Fault, ...]  # in order of time

    @property
    def overall(self) -> Tally:
        return _tally(self.faults)

    @property
    def over(self) -> bool:
        """Whether the run is over: its supervisor has left, or there is none and it is finished."""
        if self.outcome == "finished":
            return self.code is not None or not self.starts
        return self.outcome == "ended"


def _tally(faults: Sequence[Fault]) -> Tally:
    return Tally.of([(each.recovered, each.recovery.seconds if each.recovery else None) for each in faults])


# -- from events to conclusions ------------------------------------------------------------------------


class Run:
    """All facts of a run so far; it takes events in the order of the record."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.rendezvouses: list[Rendezvous] = []
        self.starts: list[Event] = []
        self.ends: list[Event] = []
        self.faults: list[Event] = []
        self.end = -math.inf  # time of the last event
        self._begin = math.inf
        self._joinable = 0  # the first rendezvous that ranks may still join: a new start begins others
        self._stints: dict[tuple[str, int], tuple[Rendezvous, Stint]] = {}  # of each process, the last
        self._restarts: list[Event] = []
        self._given_up: list[str] = []
        self._standbys: dict[tuple[str, int | None], bool] = {}
        self._storage = Storage()
        self.hosts: set[str] = set()  # that have recorded anything
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        self._begin, self.end = min(self._begin, event.time), max(self.end, event.time)
        self.hosts.add(event.host)
        generation, commit = event.whole("generation"), event.whole("commit")
        rendezvous, stint = self._stints.get((event.host, event.pid), (None, None))
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
                rank = f"rank {event.rank}" if event.rank >= 0 else "a process without a rank"
                what = f"{rank} on {event.host}" if event.word("scope") == "slot" else "the job"
                self._given_up.append(f"{what}: {event.word('reason')}")
            case "standby":
                self._standbys[event.host, event.whole("slot")] = event.facts.get("ready") is True
            case "sync":
                self._join(event, generation or 0, commit or 0)
            case "commit" if rendezvous and commit is not None:
                if not rendezvous.numbers or commit > rendezvous.numbers[-1]:
                    rendezvous.numbers.append(commit)
                    rendezvous.times.append(event.time)
            case "recovered" if rendezvous and stint and generation == rendezvous.generation:
                stint.recovered = stint.recovered or event
            case "reset" if stint:
                stint.lost, stint.left = event.whole("steps") or 0, event.time
            case "finished" if stint:
                stint.finished = event.time
            case "durable" if generation is not None and commit is not None:
                self._became_durable(event, generation, commit)
            case "outage" | "write_failed" if commit is not None:
                self._storage.failures += event.kind == "write_failed"
                self._storage.outages += event.kind == "outage"
                since = self._storage.outage.since if self._storage.outage else event.time
                self._storage.outage = Outage(since, event.word("error"))
            case "outage_over":
                self._storage.outage_seconds += event.number("seconds") or 0.0
                self._storage.outage = None

    def _join(self, event: Event, generation: int, commit: int) -> None:
        """Let a rank join a rendezvous: ranks that name the same place, each once, are together."""
        place = generation, commit, event.whole("size") or 0
        joinable = reversed(self.rendezvouses[self._joinable :])
        same = (each for each in joinable if (each.generation, each.commit, each.size) == place)
        rendezvous = next(same, None)
        if rendezvous is None or any(stint.rank == event.rank for stint in rendezvous.stints):
            rendezvous = Rendezvous(*place, event.word("source"))
            self.rendezvouses.append(rendezvous)
        stint = Stint(event.rank, event.host, event.time)
        rendezvous.stints.append(stint)
        self._stints[event.host, event.pid] = rendezvous, stint

    def _became_durable(self, event: Event, generation: int, commit: int) -> None:
        storage, seconds = self._storage, event.number("seconds") or 0.0
        storage.durable = Commit(event.time - seconds, generation, commit)
        storage.commits += 1
        storage.bytes += event.whole("bytes") or 0
        storage.seconds += seconds
        storage.outage = None
        # While the commit was written, there may have been another rendezvous.
        for rendezvous in [each for each in self.rendezvouses if each.generation == generation][-1:]:
            rendezvous.durable.add(commit)

    def report(self) -> Report:
        begin = min((start.time for start in self.starts), default=self._begin)
        faults = tuple(sorted(map(self._fault, self.faults), key=lambda fault: fault.time))
        kinds = Counter(sorted(fault.kind for fault in faults)).most_common()
        pairs = itertools.pairwise(self.rendezvouses)
        outcome, code, reason = self._outcome()
        last = self.rendezvouses[-1] if self.rendezvouses else None
        start = self.starts[-1] if self.starts else None
        versions = start.facts.get("versions", {}) if start else {}
        return Report(
            begin=begin,
            end=self.end,
            activity=self._activity(faults, outcome),
            outcome=outcome,
            code=code,
            reason=reason,
            machine=", ".join(filter(None, (start.host, start.word("machine")) if start else ())),
            versions={package: version for package, version in versions.items() if isinstance(version, str)},
            hosts=tuple(sorted(self.hosts)),
            starts=len(self.starts),
            restarts=len(self._restarts),
            warm_restarts=sum(event.facts.get("warm") is True for event in self._restarts),
            standbys=sum(self._standbys.values()),
            given_up=tuple(self._given_up),
            ranks=last.size if last else None,
            commit=Commit(last.reached(last.newest), last.generation, last.newest) if last else None,
            commits=sum(len(each.numbers) for each in self.rendezvouses),
            goodput=min(self._kept_seconds() / (self.end - begin), 1.0) if self.end > begin else None,
            steps_repeated=self._steps_repeated(),
            commits_repeated=sum(max(old.newest - new.commit, 0) for old, new in pairs if not old.ends),
            storage=replace(self._storage),  # a copy, as further events change the original
            kinds={kind: _tally([fault for fault in faults if fault.kind == kind]) for kind, _ in kinds},
            faults=faults,
        )

    def broken_by(self, fault: Event) -> int:
        """Return the place of the rendezvous that a fault broke; -1 if it came before the first."""
        since, commit = began(fault), fault.facts.get("commit")
        generation = whole(commit[0]) if isinstance(commit, list) and commit else None
        places = range(len(self.rendezvouses) - 1, -1, -1)
        # The commit of the lost process tells it. Without one, take the last in which all had agreed.
        for place in places:
            rendezvous = self.rendezvouses[place]
            if rendezvous.generation == generation and rendezvous.began <= since + _TOLERANCE:
                return place
        return next((place for place in places if self.rendezvouses[place].agreed <= since), -1)

    def _fault(self, event: Event) -> Fault:
        broken, since = self.broken_by(event), began(event)
        later = ((each, each.stepped()) for each in self.rendezvouses[broken + 1 :])
        recovery = next((_recovery(each, time - since) for each, time in later if time is not None), None)
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
            continued=recovery is None and broken >= 0 and _continued(event, self.rendezvouses[broken]),
        )

    def _steps_repeated(self) -> int:
        """All ranks train in step, so of each rendezvous the rank that lost the most steps counts for all."""
        lost = {place: max(it.lost for it in each.stints) for place, each in enumerate(self.rendezvouses)}
        for fault in self.faults:
            place = self.broken_by(fault)
            lost[place] = max(lost.get(place, 0), fault.whole("steps") or 0)
        return sum(lost.values())

    def _kept_seconds(self) -> float:
        """Sum the time from each agreement to the last commit after it that no later rendezvous lost."""
        seconds = 0.0
        kept: float = math.inf  # commits beyond this one were lost later on
        for rendezvous in reversed(self.rendezvouses):
            if rendezvous.ends:
                kept = math.inf
            newest = int(min(rendezvous.newest, kept))
            seconds += max(rendezvous.reached(newest) - rendezvous.agreed, 0.0)
            kept = min(kept, rendezvous.commit)
        return seconds

    def _outcome(self) -> tuple[str, int | None, str]:
        started = self.starts[-1].time if self.starts else -math.inf
        left = self.ends[-1] if self.ends and self.ends[-1].time >= started else None
        if left is None:
            finished = self.rendezvouses and self.rendezvouses[-1].ends
            return "finished" if finished else "open", None, ""
        # The exit code decides. A script may fail after its training function has returned, and a script
        # with Horovod's own elastic state has none of ours that could return.
        code = left.whole("code")
        return "finished" if code == 0 else "ended", code, left.word("reason")

    def _activity(self, faults: Sequence[Fault], outcome: str) -> str:
        if outcome != "open":
            return outcome
        if self._joinable >= len(self.rendezvouses):
            return "starting"
        return "training" if not faults or faults[-1].recovered else "recovering"


def began(fault: Event) -> float:
    """Return when a fault began. A hang is noticed only when its process has been silent for long."""
    silent = fault.number("silent") if fault.word("fault") == "hang" else None
    return fault.time - (silent or 0.0)


def phases(recovered: Event) -> dict[str, float]:
    found = {phase: recovered.number(phase) for phase in REPORTED}
    return {phase: seconds for phase, seconds in found.items() if seconds is not None}


def _recovery(rendezvous: Rendezvous, seconds: float) -> Recovery:
    steps, seconds = rendezvous.first_steps, max(seconds, 0.0)
    spent = phases(steps[-1]) if steps else {}
    if spent:
        spent = {"start": max(seconds - sum(spent.values()), 0.0), **spent}
    rank = steps[-1].rank if steps else None
    return Recovery(rendezvous.generation, rendezvous.commit, seconds, rank, spent)


def _continued(fault: Event, rendezvous: Rendezvous) -> bool:
    """Return whether all ranks trained on after a fault: without one, the others commit once at most."""
    if any(end > fault.time for end in rendezvous.ends):
        return True
    return len(rendezvous.times) - bisect.bisect_right(rendezvous.times, fault.time) > 1
