"""The checks of hosts: versions, Horovod's build, ssh, network, clocks and memory.

Each check is a function from answers to findings; it does not ask hosts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdrecover.checkpoint.near_root import size
from hvdrecover.doctor.findings import Finding, failure, ok, skipped, warning
from hvdrecover.doctor.host import FRAMEWORKS, Facts

VERSIONS, HOROVOD, SSH = "versions", "horovod", "ssh"
NETWORK, CLOCKS, MEMORY = "network", "clocks", "host memory"
FEATURES = {"gloo": "Gloo", "mpi": "MPI", "nccl": "NCCL", "cuda": "CUDA"}
MOST_SKEW = 1.0  # seconds; with more, reports of a run show events of different hosts in the wrong order
REFUSED_SKEW = 300.0  # seconds; servers refuse such clients: Kerberos from 5 minutes on, S3 from 15
BUFFERS = 2  # copies of the state on each rank, at most: the newest commit, and one that is being written

# Patterns of ssh's complaints, and what to do; the first that fits counts.
_SSH_REMEDIES = {
    "Could not resolve|not known|Temporary failure in name": "Correct the name, or add the host to DNS, "
    "/etc/hosts or ~/.ssh/config.",
    "Permission denied|Too many authentication": "Set up a login without a password: ssh-copy-id, or name "
    "the key with -i.",
    "Connection refused": "Start an ssh server on the host, or name its port with -p.",
    "timed out|No route|unreachable|no answer|closed by remote|reset by peer": "Check that the host is up, "
    "and that no firewall blocks ssh.",
    "No module named '?hvdrecover": "Install hvdrecover on the host, in an environment at the same path as "
    "here.",
    "No such file|not found|cannot execute": "Provide the same environment at the same path on all hosts: a "
    "shared folder, or one image.",
    "": "Log in with `ssh -o BatchMode=yes HOST true`, and repair the reported problem.",
}
_INSTALL = "Run `hvdrecover install-horovod`"
_REBUILD = "Run `hvdrecover install-horovod --rebuild`"

Hosts = Mapping[str, Facts]


def check_versions(hosts: Hosts) -> Finding:
    """All hosts must have the same packages, among them a framework."""
    host, usual = _usual(hosts)
    if differences := _differences(hosts):
        others = [name for name, each in hosts.items() if each.versions != usual.versions]
        return failure(VERSIONS, "; ".join(differences), "Install the same versions on all hosts.", others)
    if not any(usual.versions[framework] for framework in FRAMEWORKS):
        remedy = "Install one: `pip install 'hvdrecover[torch]'` or `pip install 'hvdrecover[tensorflow]'`."
        return failure(VERSIONS, f"neither torch nor tensorflow is installed on {host}", remedy)
    everywhere = f" on all {len(hosts)} hosts" if len(hosts) > 1 else ""
    shown = ", ".join(f"{package} {version}" for package, version in usual.versions.items() if version)
    return ok(VERSIONS, shown + everywhere)


def _usual(hosts: Hosts) -> tuple[str, Facts]:
    """Return the first host whose versions most hosts have."""
    every = [each.versions for each in hosts.values()]
    return max(hosts.items(), key=lambda item: every.count(item[1].versions))


def _differences(hosts: Hosts) -> list[str]:
    """Return a line for each package whose version is not the same on all hosts."""
    lines = []
    for package in dict.fromkeys(package for each in hosts.values() for package in each.versions):
        where: dict[str | None, list[str]] = {}
        for host, each in hosts.items():
            where.setdefault(each.versions.get(package), []).append(host)
        if len(where) > 1:
            parts = (f"{version or 'none'} on {', '.join(names)}" for version, names in where.items())
            lines.append(f"{package}: {', '.join(parts)}")
    return lines


def check_horovod(hosts: Hosts) -> Iterator[Finding]:
    """All hosts must be able to import Horovod, and it should have all features and our edits."""
    host, usual = _usual(hosts)
    version = usual.versions["horovod"]
    if version is None:
        yield failure(HOROVOD, f"Horovod is not installed on {host}", f"{_INSTALL}.")
        return
    loaded = [(by, each) for facts in hosts.values() for by, each in facts.horovod.items()]
    well = {by: each["built"] for by, each in loaded if not each["error"]}
    has = {name: yes for built in well.values() for name, yes in built.items()}
    found = list(_import_errors(hosts, bool(well)))
    if not has.get("gloo", True):
        what = "built without Gloo, so jobs cannot be elastic: a lost process or host restarts the whole job"
        found.append(warning(HOROVOD, what, f"Use `hvdrecover run --mpi`. {_INSTALL} to get Gloo."))
    if usual.lacks:
        what = f"{version} lacks fixes that recovery needs: {', '.join(usual.lacks)}"
        remedy = f"{_REBUILD}. hvdrecover/install/horovod.edits describes what fails without each fix."
        found.append(warning(HOROVOD, what, remedy))
    if not has.get("nccl", True) and any(each.gpus for each in hosts.values()):
        remedy = f"Set HOROVOD_GPU_OPERATIONS=NCCL. {_REBUILD}."
        found.append(warning(HOROVOD, "built without NCCL, and the hosts have GPUs", remedy))
    if not found:
        frameworks = " and ".join(f"{by} {usual.versions[by]}" for by in well)
        features = ", ".join(f"{'with' if yes else 'without'} {FEATURES[name]}" for name, yes in has.items())
        what = f"{version} works with {frameworks}, {features}; it has all of hvdrecover's fixes"
        found.append(ok(HOROVOD, what))
    yield from found


def _import_errors(hosts: Hosts, any_well: bool) -> Iterator[Finding]:
    """Yield a finding for each framework for which Horovod cannot be imported."""
    for by in FRAMEWORKS:
        answers = {host: each.horovod[by]["error"] for host, each in hosts.items() if by in each.horovod}
        errors = {host: error for host, error in answers.items() if error}
        reasons = "; ".join(f"{host}: {error}" for host, error in errors.items())
        what = f"it cannot be imported for {by}: {reasons}"
        remedy = f"{_REBUILD}, which builds it for the installed frameworks."
        if errors and any_well and all("has not been built" in error for error in errors.values()):
            yield warning(HOROVOD, what, remedy)
        elif errors:
            yield failure(HOROVOD, what, remedy, errors if len(errors) < len(answers) else ())


def check_ssh(problems: Mapping[str, str], local: Sequence[str]) -> Iterator[Finding]:
    """All hosts must start this Python when ``horovodrun`` logs in; hosts without a problem have ''."""
    if well := [host for host in problems if host not in local and not problems[host]]:
        yield ok(SSH, f"{', '.join(well)}: login works, and this Python starts there")
    elif not any(problems.values()):
        yield skipped(SSH, "this host only")
    for host, problem in problems.items():
        if problem:
            fits = (remedy for pattern, remedy in _SSH_REMEDIES.items() if re.search(pattern, problem, re.I))
            yield failure(SSH, f"{host}: {problem}", next(fits), [host])


@dataclass(frozen=True)
class Reached:
    """A host's connections to the other hosts.

    Attributes:
        interface: the network interface that leads to the other hosts; empty if there is none.
        address: its IPv4 address.
        peers: other host to the seconds that a connection took, or to the error.
    """

    interface: str
    address: str
    peers: Mapping[str, float | str]


def check_network(reached: Mapping[str, Reached]) -> Finding:
    """All hosts must connect to each other by interfaces with one name, since Horovod only takes names."""
    shown = ", ".join(f"{host} {each.interface} {each.address}" for host, each in reached.items())
    broken = {
        (host, other): f"{host} ({each.interface}) cannot connect to {other} ({reached[other].address}): {it}"
        for host, each in reached.items()
        for other, it in each.peers.items()
        if isinstance(it, str)
    }
    usual = Counter(each.interface for each in reached.values()).most_common()[0][0]
    if without := [host for host, each in reached.items() if not each.interface]:
        what = f"no interface of {', '.join(without)} leads to the other hosts"
        return failure(NETWORK, what, "Name the right one with --network-interface.", without)
    if broken:
        remedy = "Allow connections between the hosts on all ports, or name another --network-interface."
        return failure(NETWORK, "; ".join(broken.values()), remedy, _to_leave_out([*reached], set(broken)))
    if others := [host for host, each in reached.items() if each.interface != usual]:
        what = f"the interfaces that connect the hosts have different names: {shown}"
        return failure(NETWORK, what, "Give the interface the same name on all hosts.", others)
    slowest = max(float(seconds) for each in reached.values() for seconds in each.peers.values())
    return ok(NETWORK, f"all connect to all within {slowest * 1e3:.1f} ms: {shown}")


def _to_leave_out(hosts: Sequence[str], broken: set[tuple[str, str]]) -> list[str]:
    """Return hosts without which all hosts connect to all.

    That is, repeatedly, the host with the most broken connections. Of several hosts it is the last one, since
    rank 0 is on the first.
    """
    found = []
    while broken:
        counts = Counter(host for pair in broken for host in pair)
        worst = max(reversed(hosts), key=lambda host: counts[host])
        found.append(worst)
        broken = {pair for pair in broken if worst not in pair}
    return found


def check_clocks(offsets: Mapping[str, tuple[float, float]]) -> Finding:
    """All clocks should agree, by the seconds that each is ahead of one clock, and the largest error."""
    first = next(iter(offsets))
    ahead = {host: seconds - offsets[first][0] for host, (seconds, _) in offsets.items()}
    # The spread that is certain, however slow the network was.
    latest = max(seconds - error for seconds, error in offsets.values())
    spread = latest - min(seconds + error for seconds, error in offsets.values())
    if spread <= MOST_SKEW:
        error = max(error for _, error in offsets.values())
        return ok(CLOCKS, f"at most {max(map(abs, ahead.values())):.3f} s apart (± {error:.3f} s)")
    shown = ", ".join(f"{host} {seconds:+.1f} s" for host, seconds in ahead.items() if host != first)
    what = f"compared with {first}: {shown}"
    remedy = "Synchronise all clocks with the same time server (chrony, systemd-timesyncd)."
    if spread <= REFUSED_SKEW:
        return warning(CLOCKS, what, remedy)
    # At fault are the clocks that are far from the one that most clocks are close to.
    close = {
        host: [other for other in ahead if abs(ahead[other] - seconds) <= REFUSED_SKEW / 2]
        for host, seconds in ahead.items()
    }
    usual = max(close.values(), key=len)
    return failure(CLOCKS, what, remedy, [host for host in ahead if host not in usual])


def check_memory(hosts: Hosts, ranks: Mapping[str, int], state: int | None) -> Finding:
    """All hosts need memory for the copies of the state in commits."""
    largest = {host: each.memory // (BUFFERS * ranks[host]) for host, each in hosts.items()}
    shown = ", ".join(f"{size(nbytes)} on {host}" for host, nbytes in largest.items())
    what = f"enough for a state of {shown}: a commit takes up to {BUFFERS} copies of the state on each rank"
    tight = [host for host, nbytes in largest.items() if state is not None and nbytes < state]
    if state is None or not tight:
        return ok(MEMORY, what)
    if limited := [host for host in tight if hosts[host].limited]:
        what += f"; a cgroup limits {', '.join(limited)}"
    remedy = f"Free memory on {', '.join(tight)}, or use fewer slots, larger hosts or a larger cgroup."
    too_small = [host for host in tight if hosts[host].memory < state * ranks[host]]
    return failure(MEMORY, what, remedy, too_small) if too_small else warning(MEMORY, what, remedy)
