"""A run in words: the same on the terminal and on the page."""

from __future__ import annotations

import datetime
from collections import Counter
from html import escape

from hvdrecover.redaction import printable
from hvdrecover.reporting.summary import Fault, Report, Tally

CONTINUED = "training continued"  # in place of a time to recover, where ranks had no rendezvous
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"))


# -- a report ------------------------------------------------------------------------------------------


def facts(report: Report, last_event: str) -> dict[str, str]:
    """Return what there is to say of a run as a whole, by name.

    Args:
        report: of the run.
        last_event: when its last event was, for a run of which no end is known.
    """
    outcome, storage = state(report), report.storage
    if report.outcome == "open":
        outcome = f"no end yet: it is under way, or all was killed (last event {last_event})"
    durable = "no commit"
    if storage.commits:
        mean = duration(storage.seconds / storage.commits)
        durable = f"{counted(storage.commits, 'commit')}, written in {mean} on average"
    if storage.commits and storage.outages:
        outages = counted(storage.outages, "outage")
        durable += f"; {outages} of the storage, {duration(storage.outage_seconds)}"
    return {
        "outcome": outcome,
        "wall time": f"{duration(report.end - report.begin)} from {_begin(report)}",
        "goodput": "" if report.goodput is None else f"{report.goodput:.1%} of the time in committed steps",
        "repeated": f"{report.steps_repeated} steps, {report.commits_repeated} commits",
        "durable": durable,
        **_starts(report),
    }


# -- a status ------------------------------------------------------------------------------------------


def status(report: Report, now: float) -> dict[str, str]:
    """Return where a run stands, by name; ``now`` is in seconds since the Unix epoch."""
    now = max(report.end if report.over else now, report.end)
    return {
        "state": state(report),
        "wall time": f"{duration(now - report.begin)} from {_begin(report)}",
        **({} if report.over else {"last event": f"{duration(now - report.end)} ago"}),
        "progress": progress(report),
        "throughput": _throughput(report, now),
        "durable": _durable(report, now),
        "storage": _storage(report, now),
        "faults": _faults(report),
        **_starts(report),
    }


def state(report: Report) -> str:
    """Return the activity of a run, or how it ended."""
    if report.outcome == "ended":
        return f"ended before it was finished, with code {report.code}: {report.reason}"
    return report.activity


def progress(report: Report) -> str:
    """Return how far a run has got."""
    if report.ranks is None or report.commit is None:
        return "there was no rendezvous yet"
    ranks = counted(report.ranks, "rank")
    return f"commit {report.commit.number} in generation {report.commit.generation} with {ranks}"


def changes(before: Report, after: Report) -> list[str]:
    """Return a line for each event between two reports, without mere progress."""
    lines = []
    if after.starts > before.starts:
        lines.append(f"the job is started ({after.starts} so far)")
    lines += [f"fault: {the_fault(fault)}" for fault in _more(before.faults, after.faults)]
    lines += [f"given up: {reason}" for reason in after.given_up[len(before.given_up) :]]
    new, old = after.agreed, before.agreed
    if new is not None and (old is None or (new.generation, new.number) != (old.generation, old.number)):
        ranks = counted(after.ranks or 0, "rank")
        lines.append(f"{ranks} agreed in generation {new.generation} to resume from commit {new.number}")
    for fault in _more(_recovered(before), _recovered(after)):
        lines.append(f"recovered in {to_recover(fault)} from: {the_fault(fault)}")
    if after.storage.outage is not None and before.storage.outage is None:
        lines.append(f"commits cannot be made durable: {after.storage.outage.error}")
    if after.storage.outage is None and before.storage.outage is not None:
        lines.append("commits become durable again")
    if (after.outcome, after.code) != (before.outcome, before.code):
        lines.append(state(after))
    return lines


def the_fault(fault: Fault) -> str:
    """Return the kind of a fault and its rank and host, in words."""
    whose = "the job" if fault.rank is None else f"rank {rank(fault.rank)} on {fault.host}"
    return f"{fault.kind} of {whose}{f': {one_line(fault.detail)}' if fault.detail else ''}"


def _begin(report: Report) -> str:
    return moment(report.begin).isoformat(" ", "seconds")


def _starts(report: Report) -> dict[str, str]:
    found = {}
    if report.starts or report.restarts:  # else there was neither a supervisor nor a guardian
        warm = f" ({report.warm_restarts} taken over by a standby)" if report.warm_restarts else ""
        found["starts"] = f"{report.starts} of the job, {report.restarts} of single processes{warm}"
    if report.given_up:
        found["given up"] = "; ".join(report.given_up)
    return found


def _throughput(report: Report, now: float) -> str:
    if (rate := report.rate(now)) is None:
        return ""
    pace = f"{rate:.3g} commits/s" if rate >= 1 else f"{60 * rate:.3g} commits/min"
    return f"{pace} over the last {len(report.recent)}; {report.commits} in all"


def _durable(report: Report, now: float) -> str:
    if (durable := report.storage.durable) is None:
        return "no commit yet"
    age = "" if report.over else f", {duration(max(now - durable.time, 0.0))} old"
    return f"commit {durable.number}{age}; {report.storage.commits} in all"


def _storage(report: Report, now: float) -> str:
    storage = report.storage
    past = f"; {counted(storage.outages, 'outage')} so far" if storage.outages else ""
    if storage.outage is None:
        return f"works{past}" if storage.commits else ""
    return f"fails since {duration(now - storage.outage.since)}{past}: {storage.outage.error}"


def _faults(report: Report) -> str:
    if not report.faults:
        return "none"
    kinds = Counter(fault.kind for fault in report.faults).most_common()
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
    recovered = _recovered(report)
    last = f", the last in {to_recover(recovered[-1])}" if recovered else ""
    return f"{len(report.faults)} ({listed}); {len(recovered)} recovered from{last}"


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


def tallies(report: Report) -> list[tuple[str, ...]]:
    """Return a row for each kind of fault, and for all: kind, count, recovered, median and worst time."""
    kinds = {**report.kinds, **({"all": report.overall} if len(report.kinds) > 1 else {})}
    return [
        (kind, str(each.count), str(each.recovered), median(each), duration(each.worst))
        for kind, each in kinds.items()
    ]


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


def html(text: str) -> str:
    """Return a text without markup: names and errors may come from other users."""
    return escape(printable(text))
