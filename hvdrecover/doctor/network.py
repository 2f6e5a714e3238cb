"""Checks that hosts can be logged in to, find and reach each other, and agree on the time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.doctor.findings import Finding, failure, ok, skipped, warning

_SERIOUS_SKEW = 300.0  # seconds
MOST_SKEW = 1.0  # seconds; beyond it `hvdrecover report` has to correct the times of events
_SSH = "ssh"
_NAMES = "names"
_NETWORK = "network"
_CLOCKS = "clocks"

# What a complaint means, and what to do about it; the first that fits counts.
_REMEDIES = (
    (
        r"Could not resolve|not known|Temporary failure in name",
        "Give the host's right name, or add it to DNS, /etc/hosts or ssh's configuration.",
    ),
    (
        r"Permission denied|Too many authentication",
        "Let this user log in without a password: ssh-copy-id, or name the key with -i.",
    ),
    (r"Connection refused", "Start an ssh server on the host, or name its port with -p."),
    (
        r"timed out|No route|unreachable|no answer|closed by remote|reset by peer",
        "See that the host is up, and that no firewall lies between; ping it.",
    ),
    (
        r"No module named '?hvdrecover",
        "Install hvdrecover on the host, in an environment at the same path as here.",
    ),
    (
        r"No such file|not found|cannot execute",
        "Have the same environment at the same path on all hosts: a shared folder, or one image.",
    ),
)
_ANY = "Log in by `ssh -o BatchMode=yes HOST true` and mend what it complains of."


def judge_ssh(problems: Mapping[str, str], local: Sequence[str]) -> list[Finding]:
    """Return whether each host answers over ssh, with the Python that is used here.

    Args:
        problems: host to what is wrong with it; empty if nothing is.
        local: those that take no ssh, as they are this host.
    """
    remote = [host for host in problems if host not in local]
    found = [
        failure(_SSH, f"{host}: {problem}", remedy_for(problem), at_fault=[host], host=host)
        for host, problem in problems.items()
        if problem
    ]
    well = [host for host in remote if not problems[host]]
    if well:
        found.insert(0, ok(_SSH, f"{', '.join(well)}: logged in, and our Python runs there", hosts=well))
    if not remote and not found:
        found.append(skipped(_SSH, "this host only"))
    return found


def remedy_for(problem: str) -> str:
    """Return what to do about a host that can't be logged in to."""
    fitting = (advice for pattern, advice in _REMEDIES if re.search(pattern, problem, re.IGNORECASE))
    return next(fitting, _ANY)


def judge_names(resolved: Mapping[str, Mapping[str, str | None]]) -> Finding:
    """Return whether each host knows the names of the others.

    Args:
        resolved: host to what the names of all hosts stand for there.
    """
    unknown = [
        f"{host} does not know {', '.join(lacking)}"
        for host, names in resolved.items()
        if (lacking := [name for name, address in names.items() if address is None])
    ]
    if unknown:
        remedy = (
            "Add the names to DNS or to /etc/hosts of these hosts; mpirun needs them, and so may scripts."
        )
        return warning(_NAMES, "; ".join(unknown), remedy, hosts=resolved)
    return ok(_NAMES, f"all {len(resolved)} hosts know each other's names", hosts=resolved)


def addresses_of(resolved: Mapping[str, Mapping[str, str | None]]) -> dict[str, str]:
    """The address by which others know each host; those are missing that none of them knows.

    What a host knows itself by doesn't count, which may be 127.0.1.1, nor do loopback addresses.
    """
    found: dict[str, str] = {}
    for host, names in resolved.items():
        for name, address in names.items():
            if name != host and address is not None and not address.startswith("127."):
                found.setdefault(name, address)
    return found


@dataclass(frozen=True)
class Reached:
    """Find out by which interface a host reaches the others, and whether it does.

    Attributes:
        interface: its network interface; empty if it has none that leads there.
        address: its IPv4 address on it.
        problems: other host to what is wrong with a connection to it; empty if nothing is.
    """

    interface: str
    address: str
    problems: Mapping[str, str]


def judge_network(reached: Mapping[str, Reached]) -> Finding:
    """Return whether hosts reach each other, by interfaces of the same name, as Horovod wants it."""
    facts = {
        host: {"interface": each.interface, "address": each.address, "unreached": _bad(each.problems)}
        for host, each in reached.items()
    }
    lost = [host for host, each in reached.items() if not each.interface]
    if lost:
        what = f"no interface of {', '.join(lost)} leads to the other hosts"
        remedy = "Name one that all hosts have and that connects them with --network-interface."
        return failure(_NETWORK, what, remedy, at_fault=lost, hosts=facts)
    broken = [
        f"{host} ({each.interface}) can't connect to {other} ({reached[other].address}): {problem}"
        for host, each in reached.items()
        for other, problem in _bad(each.problems).items()
    ]
    if broken:
        remedy = "Let hosts connect to each other on all ports, or name another --network-interface."
        return failure(_NETWORK, "; ".join(broken), remedy, at_fault=_to_leave_out(reached), hosts=facts)
    shown = ", ".join(f"{host} {each.interface} {each.address}" for host, each in reached.items())
    if len({each.interface for each in reached.values()}) > 1:
        what = f"the interfaces that connect the hosts have different names: {shown}"
        remedy = "Give them the same name on all hosts: Horovod knows an interface by its name alone."
        (usual, _), *_ = Counter(each.interface for each in reached.values()).most_common()
        others = [host for host, each in reached.items() if each.interface != usual]
        return failure(_NETWORK, what, remedy, at_fault=others, hosts=facts)
    return ok(_NETWORK, f"all connect to all: {shown}", hosts=facts)


def _to_leave_out(reached: Mapping[str, Reached]) -> list[str]:
    """Return hosts without which all connect to all: again and again the one with the most that is broken.

    Of several, the last one is left out, as rank 0 is on the first.
    """
    broken = {(host, other) for host, each in reached.items() for other in _bad(each.problems)}
    found = []
    while broken:
        counts = Counter(host for pair in broken for host in pair)
        worst = max(reversed(list(reached)), key=lambda host: counts[host])
        found.append(worst)
        broken = {pair for pair in broken if worst not in pair}
    return found


def _bad(problems: Mapping[str, str]) -> dict[str, str]:
    return {host: problem for host, problem in problems.items() if problem}


@dataclass(frozen=True)
class Reading:
    """A clock that was read from afar.

    Attributes:
        asked: when it was asked for, by this host's clock, in seconds.
        told: what it said.
        heard: when the answer was here, by this host's clock.
    """

    asked: float
    told: float
    heard: float


def offset(readings: Sequence[Reading]) -> tuple[float, float]:
    """By how much a clock is ahead of this host's, and how far off that may be, in seconds.

    The answer was given somewhere between asking and hearing, so the middle of the two is off by half of the
    time between them at most; of several readings, the quickest says the most (F. Cristian, Probabilistic
    clock synchronization, Distributed Computing 3, 1989).
    """
    best = min(readings, key=lambda reading: reading.heard - reading.asked)
    return best.told - (best.asked + best.heard) / 2, (best.heard - best.asked) / 2


def judge_clocks(offsets: Mapping[str, tuple[float, float]]) -> Finding:
    """Return whether the hosts agree on the time.

    Args:
        offsets: host to what `offset` says of its clock.
    """
    first = next(iter(offsets))
    apart = {host: ahead - offsets[first][0] for host, (ahead, _) in offsets.items()}
    # What is sure, whatever the network's delays were.
    latest = max(ahead - off for ahead, off in offsets.values())
    spread = latest - min(ahead + off for ahead, off in offsets.values())
    facts = {"seconds_ahead": apart, "uncertain_by": {host: off for host, (_, off) in offsets.items()}}
    if spread <= MOST_SKEW:
        most = max(abs(ahead) for ahead in apart.values())
        off = max(off for _, off in offsets.values())
        return ok(_CLOCKS, f"at most {most:.3f} s apart (± {off:.3f} s)", **facts)
    shown = ", ".join(f"{host} {ahead:+.1f} s" for host, ahead in apart.items() if host != first)
    what = f"against {first}: {shown}"
    remedy = "Have all hosts set their clocks by the same time server (chrony, systemd-timesyncd)."
    if spread > _SERIOUS_SKEW:
        return failure(_CLOCKS, what, remedy, at_fault=_apart_from_most(apart), **facts)
    return warning(_CLOCKS, what, remedy, **facts)


def _apart_from_most(ahead: Mapping[str, float]) -> list[str]:
    """Return the hosts without which all clocks are near enough to the one that most others are near to."""
    near = {
        host: [other for other in ahead if abs(ahead[other] - seconds) <= _SERIOUS_SKEW / 2]
        for host, seconds in ahead.items()
    }
    usual = max(near, key=lambda host: len(near[host]))
    return [host for host in ahead if host not in near[usual]]
