"""Decide which hosts are used, spare, or excluded, and why."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from hvdrecover.errors import DiscoveryError

FIRST, LONGEST = 60.0, 3600.0  # seconds of cooldown; it doubles with each report
_REMEMBERED = 6 * 3600.0  # seconds for which a report counts
_REPEATED = 2  # reports that begin a cooldown

# One failed check may be chance, and each change of the hosts costs the job a resize.
FAILURES = 2  # failed checks in a row after which a healthy host is left out
RECOVERED = 3  # passed checks in a row after which an unhealthy host comes back
EVERY = 5.0  # seconds between two checks of a healthy host; an unhealthy one is checked at each call

State = Literal["used", "spare", "cooldown", "unhealthy", "excluded"]


@dataclass(frozen=True)
class Checks:
    ssh_port: int | None = 22  # must accept connections on other hosts; None skips this check
    identity: str | None = None  # ssh's private key, for the command
    command: str | None = None  # shell command that must succeed on each host; None skips this check

    @property
    def any(self) -> bool:
        return self.ssh_port is not None or self.command is not None


@dataclass(frozen=True)
class Health:
    """The health of one host, from its checks; times are in seconds since the epoch."""

    healthy: bool  # whether the host may be used
    since: float  # time of the last change
    checked: float  # time of the last check
    passed: float = 0.0  # time of the last check that found no problem; 0 before the first one
    streak: int = 0  # number of last checks in a row that contradict `healthy`
    why: str = ""  # the problem that the last failed check found


def health_after(before: Health | None, problem: str, now: float) -> Health:
    """Return a host's health after a check, which found no problem if ``problem`` is empty."""
    ok = not problem
    if before is None:
        return Health(ok, now, now, now if ok else 0.0, why=problem)
    streak = 0 if ok == before.healthy else before.streak + 1
    passed, why = (now if ok else before.passed), problem or before.why
    if streak == (RECOVERED if ok else FAILURES):
        return Health(ok, now, now, passed, why=why)
    return Health(before.healthy, before.since, now, passed, streak, why)


def check_is_due(health: Health | None, now: float) -> bool:
    if health is None or not health.healthy or health.streak:
        return True
    return not 0 <= now - health.checked < EVERY


@dataclass(frozen=True)
class History:
    """The results of earlier calls; times are in seconds since the epoch."""

    hosts: dict[str, int | None] = field(default_factory=dict)  # the source's last good answer: host to slots
    listed: float | None = None  # time of that answer; None before the first one
    asked: float | None = None  # time at which the source last answered or failed
    failure: str = ""  # why the source's last answer was not good
    empty: bool = False  # whether the failure is that no host was named
    first_seen: dict[str, float] = field(default_factory=dict)  # since when each host is named
    health: dict[str, Health] = field(default_factory=dict)  # health of the checked hosts
    unwritable: str = ""  # why this history cannot be written to its file


@dataclass(frozen=True)
class Settings:
    cache: Path = Path()  # folder of the history files
    checks: Checks = field(default_factory=Checks)
    timeout: float = 5.0  # seconds within which each call answers
    reports: Path | None = None  # file in which the supervisor reports hosts that fail
    slots: int = 1  # slots of hosts for which the source gives no number
    include: Sequence[str] = ()  # shell patterns; if there are any, a host must match one
    exclude: Sequence[str] = ()  # shell patterns that no host may match
    max_np: int | None = None  # the greatest number of processes of the job; hosts beyond it are spare
    last_good: float = 60.0  # seconds for which an answer may stand in for later ones that fail
    allow_empty: bool = False  # whether an empty answer is good as long as no host was ever named


@dataclass(frozen=True)
class Entry:
    name: str
    slots: int  # how many processes it takes
    state: State  # `used` and `spare` hosts are named to Horovod, others are not
    since: float  # time at which this state began, in seconds since the epoch
    why: str = ""  # the reason, if it is left out

    @property
    def named(self) -> bool:
        return self.state in ("used", "spare")


@dataclass(frozen=True)
class Answer:
    entries: tuple[Entry, ...]  # all hosts of the source: first those that are `named`, the oldest first
    warning: str = ""  # a problem with the source or all of its hosts

    @property
    def hosts(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.named)


def answer(
    source: str, history: History, settings: Settings, reports: Mapping[str, Sequence[float]], now: float
) -> Answer:
    """Return the answer of one call; `reports` has the times at which guardians reported each host."""
    failure = history.failure
    if history.listed is None:
        if history.empty and settings.allow_empty:
            return Answer((), f"{source}: {failure}")
        raise DiscoveryError(source, f"{failure}, and there is no earlier answer")
    age = now - history.listed
    if failure and abs(age) > settings.last_good:  # a negative age: the clock was set back
        raise DiscoveryError(source, f"{failure}; its last good answer is {age:.0f} s old")
    warning = f"{source}: {failure}; using its answer of {age:.0f} s ago" if failure else history.unwritable
    entries = [_entry(name, history, settings) for name in history.hosts]
    if not any(entry.named for entry in entries):
        entries = _last_healthy(entries, history, settings, now, source)
        last = f"{settings.last_good:g} s"
        warning = warning or f"{source}: no host passes its check; using those that passed in the last {last}"
    resting = [_rested(entry, reports.get(entry.name, ()), now) for entry in entries]
    if any(entry.named for entry in resting):
        entries = resting
    entries.sort(key=lambda entry: (not entry.named, entry.since))  # stable: else in the source's order
    return Answer(tuple(_limited(entries, settings.max_np)), warning)


def _entry(name: str, history: History, settings: Settings) -> Entry:
    entry = Entry(name, history.hosts[name] or settings.slots, "used", history.first_seen.get(name, 0.0))
    for pattern in settings.exclude:
        if fnmatch.fnmatchcase(name, pattern):
            return replace(entry, state="excluded", why=f"it matches --exclude {pattern}")
    if settings.include and not any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.include):
        return replace(entry, state="excluded", why="it matches no --include")
    if not settings.checks.any:
        return entry
    health = history.health.get(name)
    if health is None:
        return replace(entry, state="unhealthy", why="it was not checked yet")
    entry = replace(entry, since=max(entry.since, health.since))
    return entry if health.healthy else replace(entry, state="unhealthy", why=health.why)


def _last_healthy(
    entries: Sequence[Entry], history: History, settings: Settings, now: float, source: str
) -> list[Entry]:
    """Use the hosts that passed last, for a while: if all fail at once, this host may be cut off."""
    failing = [entry for entry in entries if entry.state != "excluded"]
    if not failing:
        raise DiscoveryError(source, f"all {len(entries)} hosts are excluded by --include and --exclude")
    health = {entry.name: history.health.get(entry.name) for entry in failing}
    recent = {name for name, each in health.items() if each and abs(now - each.passed) <= settings.last_good}
    if recent:
        return [replace(entry, state="used", why="") if entry.name in recent else entry for entry in entries]
    reasons = "".join(f"\n  {entry.name}: {entry.why}" for entry in failing[:10])
    raise DiscoveryError(source, f"none of its {len(failing)} hosts passes its check:{reasons}")


def _rested(entry: Entry, reports: Sequence[float], now: float) -> Entry:
    until = cooldown_ends_at(reports, now)
    if not entry.named or not until:
        return entry
    why = f"reported as failing {len(reports)} times; excluded for another {until - now:.0f} s"
    return replace(entry, state="cooldown", since=max(reports), why=why)


def _limited(entries: Sequence[Entry], max_np: int | None) -> Iterator[Entry]:
    """Mark the hosts beyond ``max_np`` slots as spare."""
    slots = 0
    for entry in entries:
        if entry.named:
            spare = max_np is not None and slots >= max_np
            entry = replace(entry, state="spare" if spare else "used")
            slots += entry.slots
        yield entry


# -- reports of hosts that fail ------------------------------------------------------------------------
# The supervisor appends a line of JSON for each slot that a guardian has given up. A host that is reported
# twice rests for a while, its cooldown.


def report_failure(path: Path, host: str, now: float) -> None:
    """Report a host on which a slot was given up. Raises `OSError` if the file cannot be written."""
    with path.open("ab", buffering=0) as file:
        file.write(f"{json.dumps({'time': now, 'host': host})}\n".encode())


def read_reports(path: Path | None) -> dict[str, list[float]]:
    reports: dict[str, list[float]] = {}
    try:
        lines = path.read_bytes().splitlines() if path is not None else []
    except OSError:
        return reports
    for line in lines:
        try:
            entry = json.loads(line)
            reports.setdefault(str(entry["host"]), []).append(float(entry["time"]))
        except (ValueError, TypeError, KeyError):  # incomplete: its writer was killed
            continue
    return reports


def cooldown_ends_at(reports: Sequence[float], now: float) -> float:
    """Return when the cooldown of a host with these reports ends; 0 if it is in none."""
    # A report from the future is ignored: the clock was set back after it.
    recent = sorted(time for time in reports if -FIRST < now - time < _REMEMBERED)
    if len(recent) < _REPEATED:
        return 0.0
    until = recent[-1] + min(LONGEST, FIRST * 2.0 ** min(len(recent) - _REPEATED, 16))
    return until if until > now else 0.0
