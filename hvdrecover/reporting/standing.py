"""The state of a run in words, and what has changed since it was last looked at."""

from __future__ import annotations

from collections import Counter

from hvdrecover.reporting import words
from hvdrecover.reporting.numbers import RECENT, Numbers
from hvdrecover.reporting.summary import Fault


def facts(numbers: Numbers, now: float) -> dict[str, str]:
    """Return what there is to say, by name; ``now`` is in seconds since the Unix epoch."""
    now = max(numbers.last if numbers.over else now, numbers.last)
    begin = words.moment(numbers.begin).isoformat(" ", "seconds")
    found = {"state": _state(numbers), "wall time": f"{words.duration(now - numbers.begin)} from {begin}"}
    if not numbers.over:
        found["last event"] = f"{words.duration(now - numbers.last)} ago"
    found |= {
        "progress": progress(numbers),
        "throughput": _throughput(numbers, now),
        "durable": _durable(numbers, now),
        "storage": _storage(numbers, now),
        "faults": _faults(numbers),
    }
    if numbers.starts or numbers.restarts:  # else there is neither a supervisor nor a guardian
        starts = f"{numbers.starts} of the job, {numbers.restarts} of single processes"
        found["starts"] = starts + (f" ({numbers.warm} taken over by a standby)" if numbers.warm else "")
    if numbers.given_up:
        found["given up"] = "; ".join(numbers.given_up)
    return found


def progress(numbers: Numbers) -> str:
    """Return how far it has got."""
    if numbers.agreement is None or numbers.commit is None:
        return "the ranks have not met yet"
    epoch = f", epoch {numbers.epoch} or later" if numbers.epoch is not None else ""
    ranks = _count(numbers.agreement.ranks, "rank")
    return f"commit {numbers.commit.number} in generation {numbers.commit.generation} with {ranks}{epoch}"


def changes(before: Numbers, after: Numbers) -> list[str]:
    """Return what has happened in between, a line for each, but for mere progress."""
    lines = []
    if after.starts > before.starts:
        lines.append(f"the job is started ({after.starts} so far)")
    lines += [f"fault: {_fault(fault)}" for fault in _more(before.faults, after.faults)]
    lines += [f"given up: {reason}" for reason in after.given_up[len(before.given_up) :]]
    met = after.agreement
    if met is not None and met != before.agreement:
        ranks = _count(met.ranks, "rank")
        lines.append(f"{ranks} met in generation {met.generation}, to go on from commit {met.commit}")
    for fault in _more(_recovered(before), _recovered(after)):
        seconds = words.duration(fault.recovery.seconds if fault.recovery else None)
        lines.append(f"recovered in {seconds} from: {_fault(fault)}")
    if after.outage is not None and before.outage is None:
        lines.append(f"commits can't be made durable: {after.outage.error}")
    if after.outage is None and before.outage is not None:
        lines.append("commits become durable again")
    if after.ending != before.ending:
        lines.append(_state(after))
    return lines


def _state(numbers: Numbers) -> str:
    ending = numbers.ending
    if ending.outcome == "ended":
        return f"ended before it was finished, with code {ending.code}: {ending.reason}"
    return numbers.activity


def _throughput(numbers: Numbers, now: float) -> str:
    rate = numbers.rate(now)
    if rate is None:
        return ""
    pace = f"{rate:.3g} commits/s" if rate >= 1 else f"{60 * rate:.3g} commits/min"
    return f"{pace} over the last {min(len(numbers.recent), RECENT)}; {numbers.commits} in all"


def _durable(numbers: Numbers, now: float) -> str:
    if numbers.durable is None:
        return "no commit yet"
    age = "" if numbers.over else f", {words.duration(max(now - numbers.durable.time, 0.0))} old"
    return f"commit {numbers.durable.number}{age}; {numbers.durables} in all"


def _storage(numbers: Numbers, now: float) -> str:
    past = f"; {_count(numbers.outages, 'outage')} so far" if numbers.outages else ""
    if numbers.outage is None:
        return f"works{past}" if numbers.durables else ""
    return f"fails since {words.duration(now - numbers.outage.since)}{past}: {numbers.outage.error}"


def _faults(numbers: Numbers) -> str:
    if not numbers.faults:
        return "none"
    kinds = Counter(fault.kind for fault in numbers.faults).most_common()
    recovered = _recovered(numbers)
    last = (
        f", the last in {words.duration(found.seconds)}"
        if recovered and (found := recovered[-1].recovery)
        else ""
    )
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
    return f"{len(numbers.faults)} ({listed}); {len(recovered)} recovered from{last}"


def _fault(fault: Fault) -> str:
    whose = "the job" if fault.rank is None else f"rank {words.rank(fault.rank)} on {fault.host}"
    return f"{fault.kind} of {whose}{f': {fault.detail}' if fault.detail else ''}"


def _recovered(numbers: Numbers) -> tuple[Fault, ...]:
    return tuple(fault for fault in numbers.faults if fault.recovery is not None)


def _more(before: tuple[Fault, ...], after: tuple[Fault, ...]) -> list[Fault]:
    """The faults that were not there before; their times don't tell, as a clock may have been corrected."""
    known = Counter(_fault(fault) for fault in before)
    more = []
    for fault in after:
        known[_fault(fault)] -= 1
        if known[_fault(fault)] < 0:
            more.append(fault)
    return more


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
