"""The words of a report: the same on a terminal and on a page."""

from __future__ import annotations

import datetime

from hvdrecover.reporting.summary import Fault, Report, Tally

_OUTCOMES = {
    "finished": "finished",
    "ended": "ended before it was finished",
    "open": "no end yet: it is under way, or all was killed",
}
CONTINUED = "training continued"  # in the place of a time to recover, where ranks had no rendezvous
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"))


def outcome(report: Report, last_event: str) -> str:
    """Return how a run ended.

    Args:
        report: of the run.
        last_event: when its last event was, for a run of which no end is known.
    """
    ending = report.ending
    text = _OUTCOMES[ending.outcome]
    if ending.outcome == "open":
        return f"{text} (last event {last_event})"
    return f"{text}, with code {ending.code}: {ending.reason}" if ending.outcome == "ended" else text


def facts(report: Report, last_event: str) -> dict[str, str]:
    """Return what there is to say of a run as a whole, by name; arguments as for `outcome`."""
    begin = moment(report.begin).isoformat(" ", "seconds")
    found = {
        "outcome": outcome(report, last_event),
        "wall time": f"{duration(report.end - report.begin)} from {begin}",
        "goodput": "" if report.goodput is None else f"{report.goodput:.1%} of the time in committed steps",
        "repeated": f"{report.steps_repeated} steps, {report.commits_repeated} commits",
    }
    if report.starts or report.restarts:  # else there was neither a supervisor nor a guardian
        starts = f"{report.starts} of the job, {report.restarts} of single processes"
        found["starts"] = starts + (f" ({report.warm} taken over by a standby)" if report.warm else "")
    if report.given_up:
        found["given up"] = "; ".join(report.given_up)
    if report.clocks:
        wrong = ", ".join(f"{host} by {offset:+.1f} s" for host, offset in report.clocks.items())
        found["clocks"] = f"wrong, and corrected here: {wrong}"
    return found


def surroundings(report: Report) -> dict[str, str]:
    """Return where a run was started, and with which versions, by name; empty texts if it does not tell."""
    versions = ", ".join(f"{package} {version}" for package, version in report.versions.items())
    return {"machine": report.machine, "versions": versions}


def moment(time: float) -> datetime.datetime:
    """Seconds since the Unix epoch as a date and time of the local time zone."""
    return datetime.datetime.fromtimestamp(time).astimezone()


def clock_time(time: float) -> str:
    """Seconds since the Unix epoch in short: ``01-31 12:00:36``."""
    return f"{moment(time):%m-%d %H:%M:%S}"


def duration(seconds: float | None) -> str:
    """A duration with three digits or two units: ``0.31 s``, ``12.4 s``, ``3 min 12 s``."""
    if seconds is None:
        return ""
    if seconds < 99.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    for length, unit, shorter, name in _UNITS:
        if whole >= length:
            return f"{whole // length} {unit} {whole % length // shorter} {name}"
    return f"{whole // 60} min {whole % 60} s"


def roughly(seconds: float) -> str:
    """A duration in one unit, with two digits: ``0.31 s``, ``12 s``, ``3.2 min``, ``20 days``."""
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{0 if seconds >= 10 * size else 1}f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10.0 else f"{seconds:.2g} s"


def counted(number: int, what: str, several: str = "") -> str:
    """Return a number of things in words: ``1 rank``, ``2 ranks``."""
    return f"{number} {what if number == 1 else several or what + 's'}"


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
    """The rank that had a fault: ``all`` for the whole job, ``none`` for a process that had none yet."""
    if rank is None:
        return "all"
    return str(rank) if rank >= 0 else "none"


def one_line(text: str) -> str:
    """Return the line of an error's text that says most: of a traceback the last, else the first."""
    lines = text.strip().splitlines() or [""]
    return lines[-1] if lines[0].startswith("Traceback ") else lines[0]
