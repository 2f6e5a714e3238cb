"""The selection of hosts: which are used, spare, or excluded and why; pure functions."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvdrecover.discovery import cooldown
from hvdrecover.discovery.history import History
from hvdrecover.discovery.hosts import Host
from hvdrecover.errors import DiscoveryError

State = Literal["used", "spare", "cooldown", "unhealthy", "unchecked", "excluded"]


@dataclass(frozen=True)
class Limits:
    """The user's wishes about the hosts.

    Attributes:
        slots: of hosts whose source names none.
        include: patterns as of a shell; a host must match one of them, if there are any.
        exclude: patterns that no host may match.
        max_hosts: how many hosts are named at most.
        max_np: how many processes the job takes at most; hosts beyond are spare.
        last_good: seconds for which an answer stands in for those that fail.
        allow_empty: whether no host at all is an answer as long as there was none before.
    """

    slots: int = 1
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_hosts: int | None = None
    max_np: int | None = None
    last_good: float = 60.0
    allow_empty: bool = False


@dataclass(frozen=True)
class Entry:
    """One host.

    Attributes:
        name: the host.
        slots: how many processes it takes.
        state: what becomes of it: ``used`` and ``spare`` hosts are named to Horovod.
        since: since when, in seconds since the epoch.
        why: why it is left out; an empty string if it isn't.
    """

    name: str
    slots: int
    state: State
    since: float
    why: str = ""

    @property
    def named(self) -> bool:
        """Return whether Horovod is told of it."""
        return self.state in ("used", "spare")


@dataclass(frozen=True)
class Answer:
    """The result of host discovery.

    Attributes:
        entries: all hosts of the source: first those that are named to Horovod, the oldest first.
        warning: what is wrong with the source or all of its hosts; an empty string if nothing is.
    """

    entries: tuple[Entry, ...]
    warning: str = ""

    @property
    def hosts(self) -> tuple[Entry, ...]:
        """The hosts that are named to Horovod."""
        return tuple(entry for entry in self.entries if entry.named)


def answer(
    history: History,
    limits: Limits,
    reports: Mapping[str, Sequence[float]],
    now: float,
    *,
    source: str,
    checked: bool,
    late: bool = False,
) -> Answer:
    """The answer of one call.

    Args:
        history: what is known.
        limits: what the user wants.
        reports: when each host was reported by guardians.
        now: the time.
        source: what to call the source in errors.
        checked: whether hosts must have passed their checks.
        late: whether the source has not answered this call in time.

    Raises:
        DiscoveryError: there was no good answer, or not for too long; or no host is left.
    """
    failure = history.failure or ("it has not answered in time" if late else "")
    if history.listed is None:
        if history.empty and limits.allow_empty:
            return Answer((), f"{source}: {failure}")
        raise DiscoveryError(source, f"{failure}, and there is no earlier answer")
    age = now - history.listed
    if failure and abs(age) > limits.last_good:  # less than none: the clock was set back
        raise DiscoveryError(source, f"{failure}; its last good answer is {age:.0f} s old")
    warning = f"{source}: {failure}; this is its answer of {age:.0f} s ago" if failure else ""
    entries = [_entry(host, history, limits, checked=checked) for host in history.hosts]
    if not any(entry.named for entry in entries):
        entries = _last_healthy(entries, history, limits, now, source)
        warning = (
            warning
            or f"{source}: no host passes its check; these did {now - (history.healthy_at or 0):.0f} s ago"
        )
    entries.sort(key=lambda entry: (not entry.named, entry.since))  # stable: else in the source's order
    return Answer(tuple(_limited(_without_failing(entries, reports, now), limits)), warning)


def _entry(host: Host, history: History, limits: Limits, *, checked: bool) -> Entry:
    slots = limits.slots if host.slots is None else host.slots
    since = history.first_seen.get(host.name, 0.0)
    if why := _excluded(host.name, limits):
        return Entry(host.name, slots, "excluded", since, why)
    if not checked:
        return Entry(host.name, slots, "used", since)
    health = history.health.get(host.name)
    if health is None:
        return Entry(host.name, slots, "unchecked", since, "its first check is still to come")
    since = max(since, health.since)
    return (
        Entry(host.name, slots, "used", since)
        if health.healthy
        else Entry(host.name, slots, "unhealthy", since, health.why)
    )


def _excluded(name: str, limits: Limits) -> str:
    for pattern in limits.exclude:
        if fnmatch.fnmatchcase(name, pattern):
            return f"it matches --exclude {pattern}"
    if limits.include and not any(fnmatch.fnmatchcase(name, pattern) for pattern in limits.include):
        return "it matches no --include"
    return ""


def _last_healthy(
    entries: Sequence[Entry], history: History, limits: Limits, now: float, source: str
) -> list[Entry]:
    """If none passes its check, it may be us who are cut off: for a while, those that did last stand."""
    left = [entry for entry in entries if entry.state != "excluded"]
    if not left:
        raise DiscoveryError(
            source, f"all of its {len(entries)} hosts are excluded by --include and --exclude"
        )
    if history.healthy_at is not None and abs(now - history.healthy_at) <= limits.last_good:
        stand = [
            replace(entry, state="used", why="") if entry.name in history.healthy else entry
            for entry in entries
            if entry.state != "excluded"
        ]
        if any(entry.named for entry in stand):
            return [*stand, *(entry for entry in entries if entry.state == "excluded")]
    reasons = "".join(f"\n  {entry.name}: {entry.why}" for entry in left[:10])
    raise DiscoveryError(source, f"none of its {len(left)} hosts passes its check:{reasons}")


def _without_failing(entries: list[Entry], reports: Mapping[str, Sequence[float]], now: float) -> list[Entry]:
    """Exclude hosts in their cooldown, unless nothing would be left then."""
    entered: list[Entry] = []
    for entry in entries:
        until = cooldown.ends_at(reports.get(entry.name, ()), now) if entry.named else 0.0
        if until:
            times = len(reports[entry.name])
            why = f"reported as failing {times} times; excluded for another {until - now:.0f} s"
            entered.append(replace(entry, state="cooldown", since=max(reports[entry.name]), why=why))
        else:
            entered.append(entry)
    return entered if any(entry.named for entry in entered) else entries


def _limited(entries: Sequence[Entry], limits: Limits) -> list[Entry]:
    """Leave out hosts beyond the greatest number of them, and mark those beyond the processes as spare."""
    limited: list[Entry] = []
    hosts = slots = 0
    for entry in entries:
        if not entry.named:
            limited.append(entry)
        elif limits.max_hosts is not None and hosts >= limits.max_hosts:
            why = f"there are {limits.max_hosts} older ones (--max-hosts)"
            limited.append(replace(entry, state="excluded", why=why))
        else:
            spare = limits.max_np is not None and slots >= limits.max_np
            limited.append(replace(entry, state="spare" if spare else "used"))
            hosts, slots = hosts + 1, slots + entry.slots
    return sorted(limited, key=lambda entry: not entry.named)
