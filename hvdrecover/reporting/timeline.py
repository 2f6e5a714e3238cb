"""The time line of each rank: stretches of training and recovery, faults, commits, starts.

Times are seconds since the run's beginning, by corrected clocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdrecover.record import Event
from hvdrecover.reporting.clocks import corrected, offsets
from hvdrecover.reporting.records import Log, Stint
from hvdrecover.reporting.rendezvous import Rendezvous, began, broken_by, group
from hvdrecover.reporting.summary import REPORTED

Activity = Literal["training", "recovery", "starting", "down"]


@dataclass(frozen=True)
class Stretch:
    """One activity of a rank for some time.

    Attributes:
        activity: ``training``, from a first step on; ``recovery``, from a fault, or from when ranks set out
            for a rendezvous, to the rank's first step; ``starting``, from the start of the job on; ``down``,
            while the job was not running.
        begin: in seconds since the run's beginning.
        end: the same.
        host: the rank's host.
        generation: the rendezvous that the stretch follows, or leads to; 0 if it leads to none.
        commit: the commit that was resumed from there.
        phases: of a recovery, how many seconds this rank spent on each of `REPORTED`, where known.
    """

    activity: Activity
    begin: float
    end: float
    host: str
    generation: int = 0
    commit: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Strike:
    """A fault.

    Attributes:
        number: its place among the report's faults, from 1.
        time: when it began, in seconds since the run's beginning; a hang when its process fell silent.
        kind: as in `hvdrecover.reporting.summary.Fault`, as are rank, host and detail.
        rank: the rank, -1 or None.
        host: of whoever noticed it; empty if it is not known.
        detail: a text.
        noticed: when it was noticed, in seconds since the run's beginning; None if that is not known.
    """

    number: int
    time: float
    kind: str
    rank: int | None
    host: str
    detail: str
    noticed: float | None = None


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        time: when the first rank made it, in seconds since the run's beginning.
        generation: the rendezvous after which it was made.
        number: its number.
        durable: whether it became durable.
    """

    time: float
    generation: int
    number: int
    durable: bool


@dataclass(frozen=True)
class Start:
    """A start of the whole job.

    Attributes:
        time: in seconds since the run's beginning.
        attempt: from 1; the supervisor's count.
    """

    time: float
    attempt: int


@dataclass(frozen=True)
class Timeline:
    """A run.

    Attributes:
        origin: its beginning, in seconds since the Unix epoch.
        length: seconds to its last event, or of the part of it that is shown.
        lanes: rank to what it was doing, in order of time; stretches don't overlap.
        faults: in order of time.
        commits: in order of time.
        starts: in order of time.
        begin: where the part that is shown begins, in seconds since the run's beginning.
    """

    origin: float
    length: float
    lanes: Mapping[int, Sequence[Stretch]]
    faults: Sequence[Strike]
    commits: Sequence[Commit]
    starts: Sequence[Start]
    begin: float = 0.0


def trace(log: Log) -> Timeline:
    """Find out from a run's events what each rank was doing when."""
    log = corrected(log, offsets(log))
    rendezvouses = group(log.stints)
    faults = [
        Strike(
            number=number,
            time=began(event) - log.begin,
            kind=event.word("fault") or "unknown",
            rank=None if event.whole("slot") is None else event.rank,
            host=event.host,
            detail=event.word("detail"),
            noticed=event.time - log.begin,
        )
        for number, event in enumerate(log.of("fault"), 1)
    ]
    lanes = _Lanes(log)
    lanes.follow(rendezvouses)
    for strike in faults:
        if strike.rank is not None and strike.rank >= 0:
            lanes.of.setdefault(strike.rank, [])
    return Timeline(
        origin=log.begin,
        length=log.end - log.begin,
        lanes=dict(sorted(lanes.of.items())),
        faults=sorted(faults, key=lambda fault: fault.time),
        commits=_commits(rendezvouses, log.begin),
        starts=[Start(each.time - log.begin, each.whole("attempt") or 1) for each in log.of("start")],
    )


class _Lanes:
    """Follows the ranks from rendezvous to rendezvous."""

    def __init__(self, log: Log) -> None:
        self.of: dict[int, list[Stretch]] = {}
        self._faults = log.of("fault")
        self._starts = [event.time for event in log.of("start") if (event.whole("attempt") or 1) == 1]
        self._ends = [event.time for event in log.of("end")]
        self._begin, self._end = log.begin, log.end

    def follow(self, rendezvouses: Sequence[Rendezvous]) -> None:
        activity: Activity = "starting"
        since, under_way = self._begin, True
        struck: dict[int, float] = {}  # the place of a rendezvous to when its first fault began
        for fault in self._faults:
            broke = broken_by(fault, rendezvouses)
            struck[broke] = min(began(fault), struck.get(broke, began(fault)))
        for place, rendezvous in enumerate(rendezvouses):
            if not _trained(rendezvous):
                under_way = True
                continue
            broken = _broken(place, rendezvouses, struck.get(place))
            ended = max(map(_last_sign, rendezvous.stints)) if broken is None else broken
            for stint in rendezvous.stints:
                stepped = stint.recovered.time if stint.recovered else stint.sync.time
                self._pause(stint, since, stepped, activity)
                until = stint.finished.time if stint.finished else ended
                self._add("training", stepped, until, stint)
            since, activity, under_way = ended, "recovery", broken is not None
        if rendezvouses and under_way and not rendezvouses[-1].finished:
            end = min((time for time in self._ends if time >= since), default=self._end)
            for stint in rendezvouses[-1].stints:
                self._pause(stint, since, end, activity)

    def _pause(self, stint: Stint, since: float, until: float, activity: Activity) -> None:
        """From the end of a stretch of training to the beginning of the next one."""
        started = min((start for start in self._starts if since < start <= until), default=None)
        if started is not None:
            ended = min((end for end in self._ends if since <= end <= started), default=since)
            self._add(activity, since, ended, stint)
            self._add("down", ended, started, stint)
            self._add("starting", started, until, stint)
            return
        self._add(activity, since, until, stint)

    def _add(self, activity: Activity, since: float, until: float, stint: Stint) -> None:
        lane = self.of.setdefault(stint.sync.rank, [])
        begin, end = since - self._begin, until - self._begin
        begin = max(begin, lane[-1].end if lane else 0.0)
        if end <= begin:
            return
        generation, commit, _ = stint.place
        phases = _phases(stint.recovered) if activity == "recovery" and stint.recovered else {}
        lane.append(Stretch(activity, begin, end, stint.sync.host, generation, commit, phases))


def _broken(place: int, rendezvouses: Sequence[Rendezvous], struck: float | None) -> float | None:
    """Return when a rendezvous was needed, for a fault or a change of hosts; None if nobody reports that."""
    left = [stint.left for stint in rendezvouses[place].stints if stint.left is not None]
    times = left if struck is None else [struck]
    return min([*times, *(after.began for after in rendezvouses[place + 1 : place + 2])]) if times else None


def _trained(rendezvous: Rendezvous) -> bool:
    """Return whether its ranks got as far as training.

    At the very first rendezvous no rank tells of a first step, so a commit is enough there.
    """
    initial = any(stint.sync.word("source") == "initial" for stint in rendezvous.stints)
    return rendezvous.stepped() is not None or (initial and any(stint.times for stint in rendezvous.stints))


def _last_sign(stint: Stint) -> float:
    signs = [stint.sync.time, *stint.times[-1:]]
    signs += [event.time for event in (stint.recovered, stint.finished) if event]
    return max(signs)


def _phases(recovered: Event) -> dict[str, float]:
    reported = {phase: recovered.number(phase) for phase in REPORTED}
    return {phase: seconds for phase, seconds in reported.items() if seconds is not None}


def _commits(rendezvouses: Sequence[Rendezvous], begin: float) -> list[Commit]:
    """Each commit once, at the time of the rank that made it first."""
    commits = []
    for rendezvous in rendezvouses:
        made: dict[int, float] = {}
        durable: set[int] = set()
        for stint in rendezvous.stints:
            durable.update(stint.durable)
            for number, time in zip(stint.numbers, stint.times, strict=True):
                made[number] = min(time, made.get(number, time))
        commits += [
            Commit(time - begin, rendezvous.generation, number, number in durable)
            for number, time in made.items()
        ]
    return sorted(commits, key=lambda commit: commit.time)
