"""The activity of each rank over time: training, recovering, starting or not running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hvdrecover.reporting.summary import Rendezvous, Report, Run, Stint, began, phases

# training: from a first step on. recovery: from a fault, or from when ranks set out for a rendezvous, to the
# rank's first step. starting: from the start of the job on. down: while the job was not running.
Activity = Literal["training", "recovery", "starting", "down"]


@dataclass(frozen=True)
class Stretch:
    """One activity of a rank for some time. Times are seconds since the Unix epoch."""

    activity: Activity
    begin: float
    end: float
    host: str
    generation: int  # of the rendezvous that the stretch follows, or leads to
    commit: int  # that was resumed from there
    phases: Mapping[str, float] = field(default_factory=dict)  # of a recovery: this rank's seconds, if known


Lanes = Mapping[int, Sequence[Stretch]]
"""The stretches of each rank, in order of time; they do not overlap."""


def trace(run: Run, report: Report) -> Lanes:
    """Find out what each rank was doing when."""
    struck_ranks = (fault.rank for fault in report.faults)
    lanes: dict[int, list[Stretch]] = {rank: [] for rank in struck_ranks if rank is not None and rank >= 0}
    # A later attempt is the supervisor's, and part of a recovery; a first one follows a time of nothing.
    starts = [start.time for start in run.starts if (start.whole("attempt") or 1) == 1]
    ends = [end.time for end in run.ends]

    def add(activity: Activity, begin: float, end: float, rendezvous: Rendezvous, stint: Stint) -> None:
        lane = lanes.setdefault(stint.rank, [])
        begin = max(begin, lane[-1].end if lane else report.begin)
        if end > begin:
            spent = phases(stint.recovered) if activity == "recovery" and stint.recovered else {}
            place = rendezvous.generation, rendezvous.commit
            lane.append(Stretch(activity, begin, end, stint.host, *place, spent))

    def pause(activity: Activity, begin: float, end: float, rendezvous: Rendezvous, stint: Stint) -> None:
        """Add the time from the end of training to the beginning of the next one."""
        started = min((start for start in starts if begin < start <= end), default=None)
        if started is not None:
            ended = min((each for each in ends if begin <= each <= started), default=begin)
            add(activity, begin, ended, rendezvous, stint)
            add("down", ended, started, rendezvous, stint)
            activity, begin = "starting", started
        add(activity, begin, end, rendezvous, stint)

    struck: dict[int, float] = {}  # place of a rendezvous: when the first fault that broke it began
    for fault in run.faults:
        place = run.broken_by(fault)
        struck[place] = min(began(fault), struck.get(place, began(fault)))
    activity: Activity = "starting"
    since, under_way = report.begin, True
    for place, rendezvous in enumerate(run.rendezvouses):
        if not rendezvous.trained():
            under_way = True
            continue
        # When a rendezvous was needed, for a fault or a change of hosts.
        left = [stint.left for stint in rendezvous.stints if stint.left is not None]
        broken = [struck[place]] if place in struck else left
        broken += [each.began for each in run.rendezvouses[place + 1 : place + 2]] if broken else []
        ended = min(broken) if broken else _last_sign(rendezvous)
        for stint in rendezvous.stints:
            stepped = stint.recovered.time if stint.recovered else stint.synced
            pause(activity, since, stepped, rendezvous, stint)
            add("training", stepped, ended if stint.finished is None else stint.finished, rendezvous, stint)
        since, activity, under_way = ended, "recovery", bool(broken)
    if run.rendezvouses and under_way and not run.rendezvouses[-1].finished:
        last, end = run.rendezvouses[-1], min((time for time in ends if time >= since), default=run.end)
        for stint in last.stints:
            pause(activity, since, end, last, stint)
    return dict(sorted(lanes.items()))


def _last_sign(rendezvous: Rendezvous) -> float:
    """Return when ranks of whose end nothing is known did something for the last time."""
    signs = [rendezvous.agreed, *rendezvous.times[-1:], *(step.time for step in rendezvous.first_steps)]
    return max([*signs, *(each.finished for each in rendezvous.stints if each.finished is not None)])
