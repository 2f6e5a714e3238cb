"""The state of a run in words, and what has changed since it was last looked at."""

from __future__ import annotations

from collections import Counter

from hvdrecover.reporting import words
from hvdrecover.reporting.status import RECENT, Status
from hvdrecover.reporting.summary import Fault


def facts(status: Status, now: float) -> dict[str, str]:
    """Return what there is to say, by name; ``now`` is in seconds since the Unix epoch."""
    now = max(status.last if status.over else now, status.last)
    begin = words.moment(status.begin).isoformat(" ", "seconds")
    found = {"state": _state(status), "wall time": f"{words.duration(now - status.begin)} from {begin}"}
    if not status.over:
        found["last event"] = f"{words.duration(now - status.last)} ago"
    found |= {
        "progress": progress(status),
        "throughput": _throughput(status, now),
        "durable": _durable(status, now),
        "storage": _storage(status, now),
        "faults": _faults(status),
    }
    if status.starts or status.restarts:  # else there is neither a supervisor nor a guardian
        starts = f"{status.starts} of the job, {status.restarts} of single processes"
        found["starts"] = starts + (f" ({status.warm} taken over by a standby)" if status.warm else "")
    if status.given_up:
        found["given up"] = "; ".join(status.given_up)
    return found


def progress(status: Status) -> str:
    """Return how far it has got."""
    if status.agreement is None or status.commit is None:
        return "there was no rendezvous yet"
    epoch = f", epoch {status.epoch} or later" if status.epoch is not None else ""
    ranks = words.counted(status.agreement.ranks, "rank")
    return f"commit {status.commit.number} in generation {status.commit.generation} with {ranks}{epoch}"


def changes(before: Status, after: Status) -> list[str]:
    """Return what has happened in between, a line for each, but for mere progress."""
    lines = []
    if after.starts > before.starts:
        lines.append(f"the job is started ({after.starts} so far)")
    lines += [f"fault: {the_fault(fault)}" for fault in _more(before.faults, after.faults)]
    lines += [f"given up: {reason}" for reason in after.given_up[len(before.given_up) :]]
    new = after.agreement
    if new is not None and new != before.agreement:
        ranks = words.counted(new.ranks, "rank")
        lines.append(f"{ranks} agreed in generation {new.generation} to resume from commit {new.commit}")
    for fault in _more(_recovered(before), _recovered(after)):
        seconds = words.duration(fault.recovery.seconds if fault.recovery else None)
        lines.append(f"recovered in {seconds} from: {the_fault(fault)}")
    if after.outage is not None and before.outage is None:
        lines.append(f"commits can't be made durable: {after.outage.error}")
    if after.outage is None and before.outage is not None:
        lines.append("commits become durable again")
    if after.ending != before.ending:
        lines.append(_state(after))
    return lines


def _state(status: Status) -> str:
    ending = status.ending
    if ending.outcome == "ended":
        return f"ended before it was finished, with code {ending.code}: {ending.reason}"
    return status.activity


def _throughput(status: Status, now: float) -> str:
    rate = status.rate(now)
    if rate is None:
        return ""
    pace = f"{rate:.3g} commits/s" if rate >= 1 else f"{60 * rate:.3g} commits/min"
    return f"{pace} over the last {min(len(status.recent), RECENT)}; {status.commits} in all"


def _durable(status: Status, now: float) -> str:
    if status.durable is None:
        return "no commit yet"
    age = "" if status.over else f", {words.duration(max(now - status.durable.time, 0.0))} old"
    return f"commit {status.durable.number}{age}; {status.durables} in all"


def _storage(status: Status, now: float) -> str:
    past = f"; {words.counted(status.outages, 'outage')} so far" if status.outages else ""
    if status.outage is None:
        return f"works{past}" if status.durables else ""
    return f"fails since {words.duration(now - status.outage.since)}{past}: {status.outage.error}"


def _faults(status: Status) -> str:
    if not status.faults:
        return "none"
    kinds = Counter(fault.kind for fault in status.faults).most_common()
    recovered = _recovered(status)
    last = (
        f", the last in {words.duration(found.seconds)}"
        if recovered and (found := recovered[-1].recovery)
        else ""
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
    return f"{len(status.faults)} ({listed}); {len(recovered)} recovered from{last}"


def the_fault(fault: Fault) -> str:
    """Return what a fault was, and whose."""
    whose = "the job" if fault.rank is None else f"rank {words.rank(fault.rank)} on {fault.host}"
    return f"{fault.kind} of {whose}{f': {words.one_line(fault.detail)}' if fault.detail else ''}"


def _recovered(status: Status) -> tuple[Fault, ...]:
    return tuple(fault for fault in status.faults if fault.recovery is not None)


def _more(before: tuple[Fault, ...], after: tuple[Fault, ...]) -> list[Fault]:
    """The faults that were not there before; their times don't tell, as a clock may have been corrected."""
    known = Counter(the_fault(fault) for fault in before)
    more = []
    for fault in after:
        known[the_fault(fault)] -= 1
        if known[the_fault(fault)] < 0:
            more.append(fault)
    return more
