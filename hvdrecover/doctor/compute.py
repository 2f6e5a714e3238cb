"""The judgement of how hosts compute: right, all of a kind alike, and about as fast as each other."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdrecover.doctor.findings import Finding, failure, ok, warning

COMPUTE = "compute"
SLOW = 1.5  # times the median's time, from which a host is worth a warning: clocks differ by less
CRIPPLED = 3.0  # times it, from which a job is better off without the host, as all wait for the slowest
BUSY = 0.7  # of the time; who gets less of it on its CPUs shares them with something else
_SHOWN = 4  # processors of a host; programs are told of all


@dataclass(frozen=True)
class Measured:
    """One processor, as `hvdrecover.doctor.matrix_products` reports it.

    Attributes:
        device: such as ``CPU 3``.
        kind: of processor and library.
        products: how many of each sort were computed.
        wrong: how many of whole numbers were wrong.
        bits: digests of the others, and how often each came.
        seconds: the shortest time of one; 0 if there was none.
        share: of the time, in which its process was running; None if that says nothing.
        ended: how its process has ended; empty if as it should.
    """

    device: str
    kind: str
    products: int = 0
    wrong: int = 0
    bits: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    share: float | None = None
    ended: str = ""

    @property
    def unit(self) -> str:
        """Return what it is taken together with, to be timed: the CPUs of a host are, its GPUs aren't."""
        return "CPUs" if self.device.startswith("CPU") else self.device


Hosts = Mapping[str, Sequence[Measured]]


def judge(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Return how hosts compute.

    Args:
        found: host to what `hvdrecover.doctor.matrix_products.run` tells of each of its processors.
    """
    hosts = {host: [Measured(**each) for each in devices] for host, devices in found.items()}
    facts = {"hosts": found}
    factors = _factors(hosts)
    kinds = [_apart(hosts, kind) for kind in dict.fromkeys(each.kind for each in _all(hosts))]
    failures = (
        ("computed wrongly", _wrong(hosts), _WRONG),
        ("other bits than most processors of their kind", _merged(odd for odd, _ in kinds), _OTHER),
        ("far too slow for their kind", _slower(factors, CRIPPLED), _SLOW),
    )
    warnings = (
        *(("processors of one kind compute different bits", sides, _OTHER) for _, sides in kinds),
        ("slow for their kind", _slower(factors, SLOW, CRIPPLED), _SLOW),
        ("something else takes the time of their CPUs", _busy(hosts), _FREE),
    )
    told = [
        *(
            failure(COMPUTE, f"{what}: {_named(lines)}", remedy, at_fault=lines, **facts)
            for what, lines, remedy in failures
            if lines
        ),
        *(
            warning(COMPUTE, f"{what}: {_named(lines)}", remedy, **facts)
            for what, lines, remedy in warnings
            if lines
        ),
    ]
    return told or [ok(COMPUTE, _described(hosts), **facts)]


_WRONG = "Leave out these hosts, and have their processors and memory tested: they give no other sign of it."
_OTHER = (
    "See whether environment (OPENBLAS_CORETYPE, MKL_*), firmware or virtual machine differ; if not, leave "
    "out the hosts that differ: a processor is faulty."
)
_SLOW = "Look at clocks, power limits and temperature there, or leave these hosts out."
_FREE = "Look for what else runs there (top), or for a CPU limit of the container."

Lines = dict[str, list[str]]


def _named(lines: Lines) -> str:
    """Return ``h1: CPU 3 (1 of 40 products), CPU 4 (…); h2: …``."""
    parts = []
    for host, words in lines.items():
        more = [f"{len(words) - _SHOWN} more"] if len(words) > _SHOWN else []
        parts.append(f"{host}: {', '.join([*words[:_SHOWN], *more])}")
    return "; ".join(parts)


def _merged(parts: Iterable[Lines]) -> Lines:
    found: Lines = {}
    for part in parts:
        for host, words in part.items():
            found.setdefault(host, []).extend(words)
    return found


def _wrong(hosts: Hosts) -> Lines:
    found: Lines = {}
    for host, devices in hosts.items():
        for each in devices:
            if each.ended:
                found.setdefault(host, []).append(f"{each.device} (its process has ended with {each.ended})")
            elif each.wrong:
                words = f"{each.device} ({each.wrong} of {each.products} products)"
                found.setdefault(host, []).append(words)
    return found


def _apart(hosts: Hosts, kind: str) -> tuple[Lines, Lines]:
    """Return processors whose bits are not those of most of a kind; or, if there is no most, all of it.

    Each processor has a vote, but for those that are known to compute wrongly.
    """
    alike = {
        host: [each for each in devices if each.kind == kind and not each.wrong]
        for host, devices in hosts.items()
    }
    votes = Counter(bits for each in _all(alike) for bits in each.bits)
    if len(votes) < 2:
        return {}, {}
    (most, count), (_, second), *_ = votes.most_common()
    odd = {
        host: words
        for host, devices in alike.items()
        if (words := [each.device for each in devices if set(each.bits) - {most}])
    }
    if count > second:
        return odd, {}
    return {}, {
        host: [" and ".join(sorted({bits[:8] for each in devices for bits in each.bits}))]
        for host, devices in alike.items()
        if devices
    }


def _factors(hosts: Hosts) -> dict[str, dict[str, float]]:
    """Return for each host, and each unit of it, how many times the median of its kind it takes.

    A unit that shares its time with something else is not timed, as that would be judged twice. Of two, the
    faster one is the median: what is slow is to be found, and nothing is too fast.
    """
    units: dict[tuple[str, str, str], list[Measured]] = {}
    for host, devices in hosts.items():
        for each in devices:
            if each.seconds:
                units.setdefault((host, each.unit, each.kind), []).append(each)
    times = {
        unit: statistics.median(each.seconds for each in devices)
        for unit, devices in units.items()
        if _share(devices) >= BUSY
    }
    found: dict[str, dict[str, float]] = {}
    for (host, unit, kind), seconds in times.items():
        median = statistics.median_low(other for (*_, its), other in times.items() if its == kind)
        found.setdefault(host, {})[unit] = seconds / median
    return found


def _slower(factors: Mapping[str, Mapping[str, float]], least: float, most: float = math.inf) -> Lines:
    found: Lines = {}
    for host, units in factors.items():
        for unit, factor in units.items():
            if least <= factor < most:
                found.setdefault(host, []).append(f"{unit} with {factor:.1f} times the median's time")
    return found


def _busy(hosts: Hosts) -> Lines:
    shares = {host: _share(devices) for host, devices in hosts.items()}
    return {host: [f"a job would get {share:.0%}"] for host, share in shares.items() if share < BUSY}


def _share(devices: Sequence[Measured]) -> float:
    """Return how much of the time processes have got, where that is known."""
    shares = [each.share for each in devices if each.share is not None]
    return statistics.mean(shares) if shares else 1.0


def _described(hosts: Hosts) -> str:
    products = sum(2 * each.products for each in _all(hosts))
    what = f"{products} matrix products on {sum(map(len, hosts.values()))} processors are right"
    if len({each.kind for each in _all(hosts)}) < sum(map(len, hosts.values())):
        what += ", and alike on all of a kind"
    times = [
        f"a {each.device.split()[0].rstrip('s')} takes {each.seconds * 1e3:.3g} ms"
        for each in _fastest(hosts)
    ]
    return f"{what}; {' and '.join(times)} for one"


def _fastest(hosts: Hosts) -> list[Measured]:
    """The fastest processor of each kind."""
    fastest: dict[str, Measured] = {}
    for each in _all(hosts):
        if each.kind not in fastest or each.seconds < fastest[each.kind].seconds:
            fastest[each.kind] = each
    return list(fastest.values())


def _all(hosts: Hosts) -> Iterable[Measured]:
    return [each for devices in hosts.values() for each in devices]
