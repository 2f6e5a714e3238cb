"""The words of a time line: of each of its shapes when that is pointed at, and as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from hvdrecover.reporting import words
from hvdrecover.reporting.timeline import Commit, Start, Stretch, Strike, Timeline

_NAMED_FAULTS = 10  # in a description


def title(timeline: Timeline) -> str:
    """Return what is drawn."""
    since = f", from {words.duration(timeline.begin)} on" if timeline.begin else ""
    ranks = words.counted(len(timeline.lanes), "rank")
    return f"Time line of {ranks} over {words.duration(timeline.length)}{since}"


def description(timeline: Timeline) -> str:
    """Return what is drawn, for those who can't see it."""
    durable = sum(commit.durable for commit in timeline.commits)
    found = words.counted(len(timeline.faults), "fault")
    commits = words.counted(len(timeline.commits), "commit")
    starts = words.counted(len(timeline.starts), "start")
    parts = [f"{found}, {commits} ({durable} durable) and {starts} of the job."]
    parts += [f"{faults(timeline, [fault])}." for fault in timeline.faults[:_NAMED_FAULTS]]
    if len(timeline.faults) > _NAMED_FAULTS:
        parts.append("The table of faults has more.")
    return " ".join(parts)


def stretches(timeline: Timeline, rank: int, together: Sequence[Stretch]) -> str:
    """Of stretches of a rank that are drawn as one; mostly one alone."""
    first, seconds = together[0], words.duration(together[-1].end - together[0].begin)
    when = f"from {_clock(timeline, first.begin)}"
    if len(together) > 1:
        recoveries = sum(stretch.activity == "recovery" for stretch in together)
        return f"rank {rank}: {words.counted(recoveries, 'recovery', 'recoveries')} in {seconds}, {when}"
    what = {
        "training": f"training for {seconds} after commit {first.commit}, generation {first.generation}",
        "recovery": f"recovery to commit {first.commit} in {seconds}, generation {first.generation}",
        "starting": f"starting for {seconds}",
        "down": f"not running for {seconds}",
    }[first.activity]
    spent = ", ".join(f"{name.replace('_', ' ')} {value:.2f} s" for name, value in first.phases.items())
    phases = f"; its own phases: {spent}" if spent else ""
    return f"rank {rank} on {first.host}: {what}, {when}{phases}"


def commits(timeline: Timeline, together: Sequence[Commit]) -> str:
    """Of commits that are drawn as one; mostly one alone."""
    numbers = [commit.number for commit in together]
    name = f"commit {numbers[0]}" if len(numbers) == 1 else f"commits {min(numbers)} to {max(numbers)}"
    durable = sum(commit.durable for commit in together)
    state = "durable" if durable == len(together) else f"{durable} of {len(together)} durable"
    state = state if durable else "in memory only"
    return f"{name}, {state}, generation {together[0].generation}, {_clock(timeline, together[0].time)}"


def start(timeline: Timeline, start: Start) -> str:
    """Of a start of the job."""
    return f"start of the job, attempt {start.attempt}, {_clock(timeline, start.time)}"


def faults(timeline: Timeline, together: Sequence[Strike]) -> str:
    """Of faults that are drawn as one; mostly one alone."""
    texts = []
    for fault in together:
        who = {None: "the whole job", -1: "a process without a rank"}.get(fault.rank, f"rank {fault.rank}")
        when = _clock(timeline, fault.time)
        where = f" on {fault.host}" if fault.host else ""
        text = f"fault {fault.number}: {fault.kind} of {who}{where}, {when}"
        if fault.noticed is not None and fault.noticed - fault.time >= 1.0:
            text += f", noticed {_clock(timeline, fault.noticed)}"
        texts.append(f"{text}: {fault.detail}" if fault.detail else text)
    return "; ".join(texts)


def _clock(timeline: Timeline, seconds: float) -> str:
    return f"{words.moment(timeline.origin + seconds):%H:%M:%S}"
