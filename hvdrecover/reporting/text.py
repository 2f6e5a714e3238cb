"""A run in words: the same for all commands and on the page."""

from __future__ import annotations

import datetime
from collections import Counter
from html import escape

from hvdrecover.reporting.summary import PHASES, Fault, Report, Tally
from hvdrecover.texts import printable

CONTINUED = "training continued"  # in place of a time to recover, where ranks had no rendezvous
# Columns; those that end with ">" are aligned to the right.
TALLY = ("fault", "count>", "recovered>", "median>", "worst>")
_PHASES = [f"{phase.replace('_', ' ')}>" for phase in PHASES]
FAULT = ("time", "fault", "host", "rank>", "steps>", "to recover>", *_PHASES)
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"))


# -- facts ---------------------------------------------------------------------------------------------


def figures(report: Report) -> dict[str, tuple[str, str]]:
    """Return what readers want to know first: by name a number, and the words that follow it."""
    overall, kinds = report.overall, Counter(fault.kind for fault in report.faults).most_common()
    begin = moment(report.begin).isoformat(" ", "seconds")
    found = {"wall time": (duration(report.end - report.begin), f"from {begin}")}
    if report.goodput is not None:
        found["goodput"] = f"{report.goodput:.1%}", "of the time in committed steps"
    found["repeated"] = counted(report.steps_repeated, "step"), f"and {report.commits_repeated} commits"
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds)
    found["faults"] = str(overall.count), f"({listed}); {overall.recovered} recovered from" if kinds else ""
    if overall.median is not None:
        worst = f"in the median, {duration(overall.worst)} at worst"
        found["time to recover"] = duration(overall.median), worst if overall.recovered > 1 else ""
    return found


def facts(report: Report, now: float) -> dict[str, str]:
    """Return all that there is to say of a run as a whole, by name; ``now`` is in seconds since 1970."""
    warm = f" ({report.warm_restarts} taken over by a standby)" if report.warm_restarts else ""
    starts = f"{report.starts} of the job, {report.restarts} of single processes{warm}"
    found = {
        "state": state(report),
        **{name: " ".join(words).strip() for name, words in figures(report).items()},
        "last fault": _last_fault(report),
        "last event": "" if report.over else f"{duration(max(now - report.end, 0.0))} ago",
        "progress": progress(report),
        "durable": _durable(report, now),
        "storage": _storage(report),
        "starts": starts if report.starts or report.restarts else "",
        "given up": "; ".join(report.given_up),
        "machine": report.machine,
        "versions": ", ".join(f"{package} {version}" for package, version in report.versions.items()),
    }
    return {name: fact for name, fact in found.items() if fact}


def state(report: Report) -> str:
    if report.outcome == "ended":
        return f"ended before it was finished, with code {report.code}: {report.reason}"
    return report.activity


def progress(report: Report) -> str:
    if report.ranks is None or report.commit is None:
        return "there was no rendezvous yet"
    ranks = counted(report.ranks, "rank")
    return f"commit {report.commit.number} in generation {report.commit.generation} with {ranks}"


def _durable(report: Report, now: float) -> str:
    storage = report.storage
    if storage.durable is None:
        return "no commit yet"
    age = "" if report.over else f", {duration(max(now - storage.durable.time, 0.0))} old"
    size = f"{storage.bytes / 1e6:,.1f} MB in {duration(storage.seconds)}"
    mean = duration(storage.seconds / storage.commits)
    return f"commit {storage.durable.number}{age}; {storage.commits} in all, {size}, {mean} a commit"


def _last_fault(report: Report) -> str:
    if not report.faults:
        return ""
    fault = report.faults[-1]
    whose = "the job" if fault.rank is None else f"rank {rank(fault.rank)} on {fault.host}"
    detail = f": {one_line(fault.detail)}" if fault.detail else ""
    recovered = f"recovered in {to_recover(fault)}" if fault.recovery else to_recover(fault)
    return f"{clock_time(fault.time)} {fault.kind} of {whose}{detail}; {recovered}"


def _storage(report: Report) -> str:
    storage = report.storage
    past = f"; {storage.failures} attempts failed" if storage.failures else ""
    if storage.outages:
        past += f"; {counted(storage.outages, 'outage')}, {duration(storage.outage_seconds)}"
    if storage.outage is not None:
        return f"fails since {clock_time(storage.outage.since)}{past}: {storage.outage.error}"
    return f"works{past}" if storage.commits else past.lstrip("; ")


# -- faults --------------------------------------------------------------------------------------------


def fault_row(fault: Fault) -> list[str]:
    spent = fault.recovery.phases if fault.recovery else {}
    return [
        *(clock_time(fault.time), fault.kind, fault.host, rank(fault.rank)),
        "" if fault.steps is None else str(fault.steps),
        to_recover(fault),
        *(f"{spent[phase]:.2f}" if phase in spent else "" for phase in PHASES),
    ]


def tally_row(kind: str, tally: Tally) -> list[str]:
    continued = tally.median is None and tally.recovered == tally.count
    median = CONTINUED if continued else duration(tally.median)
    return [kind, str(tally.count), str(tally.recovered), median, duration(tally.worst)]


def to_recover(fault: Fault) -> str:
    if fault.recovery is not None:
        return duration(fault.recovery.seconds)
    return CONTINUED if fault.continued else "not recovered yet"


def rank(rank: int | None) -> str:
    """Return the rank that had a fault: ``all`` for the job, ``none`` for a process that had none yet."""
    if rank is None:
        return "all"
    return str(rank) if rank >= 0 else "none"


# -- words ---------------------------------------------------------------------------------------------


def moment(time: float) -> datetime.datetime:
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


def counted(number: int, what: str) -> str:
    """Return a number of things in words: ``1 rank``, ``2 ranks``."""
    return f"{number} {what if number == 1 else what + 's'}"


def one_line(text: str) -> str:
    """Return the line of an error's text that says most: of a traceback the last, else the first."""
    lines = text.strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback ") else lines[0]


def html(text: str) -> str:
    """Return a text without markup: names and errors may come from other users."""
    return escape(printable(text))
