"""A run in words: the same on the terminal and on the page."""

from __future__ import annotations

import datetime
from collections import Counter

from hvdrecover.reporting.summary import RECENT, Fault, Report, Tally

CONTINUED = "training continued"  # in place of a time to recover, where ranks had no rendezvous
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"))


# -- a report ------------------------------------------------------------------------------------------


def facts(report: Report, last_event: str) -> dict[str, str]:
    """Return what there is to say of a run as a whole, by name.

    Args:
        report: of the run.
        last_event: when its last event was, for a run of which no end is known.
    """
    found = {
        "outcome": outcome(report, last_event),
        "wall time": f"{duration(report.end - report.begin)} from {_begin(report)}",
        "goodput": "" if report.goodput is None else f"{report.goodput:.1%} of the time in committed steps",
        "repeated": f"{report.steps_repeated} steps, {report.commits_repeated} commits",
        "durable": _durables(report),
    }
    return found | _starts(report)


def outcome(report: Report, last_event: str) -> str:
    """Return how a run ended; arguments as of `facts`."""
    if report.ending.outcome == "open":
        return f"no end yet: it is under way, or all was killed (last event {last_event})"
    return state(report)


def surroundings(report: Report) -> dict[str, str]:
    """Return where a run was started, and with which versions, by name."""
    versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
    return {name: text for name, text in (("machine", report.machine), ("versions", versions)) if text}


def _durables(report: Report) -> str:
    if not report.durables:
        return "no commit"
    mean = duration(report.durable_seconds / report.durables)
    text = f"{counted(report.durables, 'commit')}, written in {mean} on average"
    if report.outages:
        text += f"; {counted(report.outages, 'outage')} of the storage, {duration(report.outage_seconds)}"
    return text


# -- a status ------------------------------------------------------------------------------------------


def status(report: Report, now: float) -> dict[str, str]:
    """Return where a run stands, by name; ``now`` is in seconds since the Unix epoch."""
    now = max(report.end if report.over else now, report.end)
    found = {
        "state": state(report),
        "wall time": f"{duration(now - report.begin)} from {_begin(report)}",
    }
    if not report.over:
        found["last event"] = f"{duration(now - report.end)} ago"
    found |= {
        "progress": progress(report),
        "throughput": _throughput(report, now),
        "durable": _durable(report, now),
        "storage": _storage(report, now),
        "faults": _faults(report),
    }
    return found | _starts(report)


def state(report: Report) -> str:
    """Return the activity of a run, or how it ended."""
    ending = report.ending
    if ending.outcome == "ended":
        return f"ended before it was finished, with code {ending.code}: {ending.reason}"
    return report.activity


def progress(report: Report) -> str:
    """Return how far a run has got."""
    if report.agreement is None or report.commit is None:
        return "there was no rendezvous yet"
    epoch = f", epoch {report.epoch} or later" if report.epoch is not None else ""
    ranks = counted(report.agreement.ranks, "rank")
    return f"commit {report.commit.number} in generation {report.commit.generation} with {ranks}{epoch}"


def changes(before: Report, after: Report) -> list[str]:
    """Return what has happened in between, a line for each, except mere progress."""
    lines = []
    if after.starts > before.starts:
        lines.append(f"the job is started ({after.starts} so far)")
    lines += [f"fault: {the_fault(fault)}" for fault in _more(before.faults, after.faults)]
    lines += [f"given up: {reason}" for reason in after.given_up[len(before.given_up) :]]
    new, old = after.agreement, before.agreement
    if new is not None and (old is None or (new.generation, new.commit) != (old.generation, old.commit)):
        ranks = counted(new.ranks, "rank")
        lines.append(f"{ranks} agreed in generation {new.generation} to resume from commit {new.commit}")
    for fault in _more(_recovered(before), _recovered(after)):
        seconds = duration(fault.recovery.seconds if fault.recovery else None)
        lines.append(f"recovered in {seconds} from: {the_fault(fault)}")
    if after.outage is not None and before.outage is None:
        lines.append(f"commits cannot be made durable: {after.outage.error}")
    if after.outage is None and before.outage is not None:
        lines.append("commits become durable again")
    if after.ending != before.ending:
        lines.append(state(after))
    return lines


def the_fault(fault: Fault) -> str:
    """Return what a fault was, and whose."""
    whose = "the job" if fault.rank is None else f"rank {rank(fault.rank)} on {fault.host}"
    return f"{fault.kind} of {whose}{f': {one_line(fault.detail)}' if fault.detail else ''}"


def _begin(report: Report) -> str:
    return moment(report.begin).isoformat(" ", "seconds")


def _starts(report: Report) -> dict[str, str]:
    found = {}
    if report.starts or report.restarts:  # else there was neither a supervisor nor a guardian
        starts = f"{report.starts} of the job, {report.restarts} of single processes"
        found["starts"] = starts + (f" ({report.warm} taken over by a standby)" if report.warm else "")
    if report.given_up:
        found["given up"] = "; ".join(report.given_up)
    return found


def _throughput(report: Report, now: float) -> str:
    rate = report.rate(now)
    if rate is None:
        return ""
    pace = f"{rate:.3g} commits/s" if rate >= 1 else f"{60 * rate:.3g} commits/min"
    return f"{pace} over the last {min(len(report.recent), RECENT)}; {report.commits} in all"


def _durable(report: Report, now: float) -> str:
    if report.durable is None:
        return "no commit yet"
    age = "" if report.over else f", {duration(max(now - report.durable.time, 0.0))} old"
    return f"commit {report.durable.number}{age}; {report.durables} in all"


def _storage(report: Report, now: float) -> str:
    past = f"; {counted(report.outages, 'outage')} so far" if report.outages else ""
    if report.outage is None:
        return f"works{past}" if report.durables else ""
    return f"fails since {duration(now - report.outage.since)}{past}: {report.outage.error}"


def _faults(report: Report) -> str:
    if not report.faults:
        return "none"
    kinds = Counter(fault.kind for fault in report.faults).most_common()
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
    recoveries = [fault.recovery for fault in report.faults if fault.recovery is not None]
    last = f", the last in {duration(recoveries[-1].seconds)}" if recoveries else ""
    return f"{len(report.faults)} ({listed}); {len(recoveries)} recovered from{last}"


def _recovered(report: Report) -> tuple[Fault, ...]:
    return tuple(fault for fault in report.faults if fault.recovery is not None)


def _more(before: tuple[Fault, ...], after: tuple[Fault, ...]) -> list[Fault]:
    """Return the faults that were not there before."""
    known = {(fault.time, fault.kind, fault.host, fault.rank) for fault in before}
    return [fault for fault in after if (fault.time, fault.kind, fault.host, fault.rank) not in known]


# -- words ---------------------------------------------------------------------------------------------


def to_recover(fault: Fault) -> str:
    """Return how long it took to recover from a fault."""
    if fault.recovery is not None:
        return duration(fault.recovery.seconds)
    return CONTINUED if fault.continued else "not yet"


def median(tally: Tally) -> str:
    """Return how long it took to recover from faults of one kind, in the median."""
    continued = tally.median is None and tally.recovered == tally.count
    return CONTINUED if continued else duration(tally.median)


def rank(rank: int | None) -> str:
    """Return the rank that had a fault: ``all`` for the job, ``none`` for a process that had none yet."""
    if rank is None:
        return "all"
    return str(rank) if rank >= 0 else "none"


def moment(time: float) -> datetime.datetime:
    """Return seconds since the Unix epoch as a date and time of the local time zone."""
    return datetime.datetime.fromtimestamp(time).astimezone()


def clock_time(time: float) -> str:
    """Return seconds since the Unix epoch in short: ``01-31 12:00:36``."""
    return f"{moment(time):%m-%d %H:%M:%S}"


def duration(seconds: float | None) -> str:
    """Return a duration with three digits or two units: ``0.31 s``, ``12.4 s``, ``3 min 12 s``."""
    if seconds is None:
        return ""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for length, unit, shorter, name in _UNITS:
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // shorter} {name}"
    return f"{whole // 60} min {whole % 60} s"


def counted(number: int, what: str, several: str = "") -> str:
    """Return a number of things in words: ``1 rank``, ``2 ranks``."""
    return f"{number} {what if number == 1 else several or what + 's'}"


def one_line(text: str) -> str:
    """Return the line of an error's text that says most: of a traceback the last, else the first."""
    lines = text.strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback ") else lines[0]
