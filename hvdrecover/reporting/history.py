"""The activity of each rank over time: training, recovering, starting or not running.

Times are seconds since the run's beginning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdrecover.reporting.summary import Fault, Rendezvous, Run, Stint, began, phases

Activity = Literal["training", "recovery", "starting", "down"]


@dataclass(frozen=True)
class Stretch:
    """One activity of a rank for some time.

    Attributes:
        activity: ``training`` from a first step on; ``recovery`` from a fault, or from when ranks set out for
            a rendezvous, to the rank's first step; ``starting`` from the start of the job on; ``down`` while
            the job was not running.
        begin: when it began.
        end: when it ended.
        host: the rank's host.
        generation: the rendezvous that the stretch follows, or leads to.
        commit: the commit that was resumed from there.
        phases: of a recovery, how many seconds this rank spent on each phase, where known.
    """

    activity: Activity
    begin: float
    end: float
    host: str
    generation: int
    commit: int
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """A commit.

    Attributes:
        time: when the first rank had made it.
        generation: its generation.
        number: its number.
        durable: whether it became durable.
    """

    time: float
    generation: int
    number: int
    durable: bool


@dataclass(frozen=True)
class History:
    """The history of a run.

    Attributes:
        origin: its beginning, in seconds since the Unix epoch.
        length: seconds to its last event.
        lanes: rank to its stretches, in order of time; they do not overlap.
        faults: in the order of the report; their times are seconds since the Unix epoch.
        commits: in order of time.
        starts: time of each start of the job.
    """

    origin: float
    length: float
    lanes: Mapping[int, Sequence[Stretch]]
    faults: Sequence[Fault]
    commits: Sequence[Commit]
    starts: Sequence[float]


def trace(run: Run) -> History:
    """Find out what each rank was doing when."""
    report = run.report()
    lanes = _Lanes(run, report.begin)
    lanes.follow()
    for fault in report.faults:
        if fault.rank is not None and fault.rank >= 0:
            lanes.of.setdefault(fault.rank, [])
    commits = [
        Commit(time - report.begin, each.generation, number, number in each.durable)
        for each in run.rendezvouses
        for number, time in zip(each.numbers, each.times, strict=True)
    ]
    return History(
        origin=report.begin,
        length=report.end - report.begin,
        lanes=dict(sorted(lanes.of.items())),
        faults=report.faults,
        commits=sorted(commits, key=lambda commit: commit.time),
        starts=[start.time - report.begin for start in run.starts],
    )


class _Lanes:
    """Follows the ranks from rendezvous to rendezvous."""

    def __init__(self, run: Run, begin: float) -> None:
        self.of: dict[int, list[Stretch]] = {}
        self._run = run
        self._begin = begin
        # A later attempt is the supervisor's, and part of a recovery; a first one follows a time of nothing.
        self._starts = [start.time for start in run.starts if (start.whole("attempt") or 1) == 1]
        self._ends = [end.time for end in run.ends]

    def follow(self) -> None:
        run = self._run
        activity: Activity = "starting"
        since, under_way = self._begin, True
        struck: dict[int, float] = {}  # the place of a rendezvous to when its first fault began
        for fault in run.faults:
            place = run.broken_by(fault)
            struck[place] = min(began(fault), struck.get(place, began(fault)))
        for place, rendezvous in enumerate(run.rendezvouses):
            if not rendezvous.trained():
                under_way = True
                continue
            broken = self._broken(place, struck.get(place))
            ended = _last_sign(rendezvous) if broken is None else broken
            for stint in rendezvous.stints:
                stepped = stint.recovered.time if stint.recovered else stint.synced
                self._pause(rendezvous, stint, since, stepped, activity)
                until = ended if stint.finished is None else stint.finished
                self._add("training", stepped, until, rendezvous, stint)
            since, activity, under_way = ended, "recovery", broken is not None
        if run.rendezvouses and under_way and not run.rendezvouses[-1].finished:
            end = min((time for time in self._ends if time >= since), default=run.end)
            for stint in run.rendezvouses[-1].stints:
                self._pause(run.rendezvouses[-1], stint, since, end, activity)

    def _broken(self, place: int, struck: float | None) -> float | None:
        """Return when a rendezvous was needed, for a fault or a change of hosts; None if none was."""
        stints = self._run.rendezvouses[place].stints
        times = [stint.left for stint in stints if stint.left is not None] if struck is None else [struck]
        after = [each.began for each in self._run.rendezvouses[place + 1 : place + 2]]
        return min([*times, *after]) if times else None

    def _pause(
        self, rendezvous: Rendezvous, stint: Stint, since: float, until: float, activity: Activity
    ) -> None:
        """Add the time from the end of training to the beginning of the next one."""
        started = min((start for start in self._starts if since < start <= until), default=None)
        if started is not None:
            ended = min((end for end in self._ends if since <= end <= started), default=since)
            self._add(activity, since, ended, rendezvous, stint)
            self._add("down", ended, started, rendezvous, stint)
            self._add("starting", started, until, rendezvous, stint)
        else:
            self._add(activity, since, until, rendezvous, stint)

    def _add(
        self, activity: Activity, since: float, until: float, rendezvous: Rendezvous, stint: Stint
    ) -> None:
        lane = self.of.setdefault(stint.rank, [])
        begin, end = since - self._begin, until - self._begin
        begin = max(begin, lane[-1].end if lane else 0.0)
        if end > begin:
            spent = phases(stint.recovered) if activity == "recovery" and stint.recovered else {}
            place = rendezvous.generation, rendezvous.commit
            lane.append(Stretch(activity, begin, end, stint.host, *place, spent))


def _last_sign(rendezvous: Rendezvous) -> float:
    signs = [rendezvous.agreed, *rendezvous.times[-1:]]
    signs += [step.time for step in rendezvous.first_steps]
    return max([*signs, *(each.finished for each in rendezvous.stints if each.finished is not None)])
