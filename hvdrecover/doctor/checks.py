"""The checks: each is a function from the answers of hosts to findings; it does not ask hosts.

A finding is an outcome, a sentence, and what to do. `select` leaves out the hosts that are at fault.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdrecover.checkpoint.near_root import size
from hvdrecover.checkpoint.settings import Keep
from hvdrecover.doctor.host import FRAMEWORKS, Facts
from hvdrecover.errors import LaunchError

VERSIONS, HOROVOD, SSH = "versions", "horovod", "ssh"
NETWORK, CLOCKS, MEMORY = "network", "clocks", "host memory"
ROOT, WRITING, SHARED, SPACE = "checkpoint root", "root: writing", "root: shared", "root: space"
MOST_SKEW = 1.0  # seconds; with more, ages of commits and of claims are wrong
REFUSED_SKEW = 300.0  # seconds; servers refuse such clients: Kerberos from 5 minutes on, S3 from 15
BUFFERS = 2  # copies of the state on each rank, at most: the newest commit, and one that is being written
COMMITS = Keep().last + 1  # commits at a root by default, and one that is being written
# With a failure, a job cannot run. With a warning it can, with a disadvantage. Skipped: not possible.
Outcome = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    outcome: Outcome
    what: str  # the observation, or the reason for skipping
    remedy: str = ""  # what to do about a warning or a failure
    at_fault: Sequence[str] = ()  # hosts without which the failure would be gone; empty if it concerns all

    def __str__(self) -> str:
        return f"{self.check}: {self.what}. {self.remedy}".rstrip()


def select(
    hosts: Mapping[str, int], findings: Sequence[Finding], least: int
) -> tuple[dict[str, int], dict[str, Finding]]:
    """Leave out the hosts at fault of a job that needs at least so many slots.

    Return the other hosts with their slots, and each excluded host with its first failure. Raises
    `LaunchError` if too few slots are left, or a failure concerns all hosts.
    """
    excluded: dict[str, Finding] = {}
    for finding in (each for each in findings if each.outcome == "failure"):
        at_fault = [host for host in finding.at_fault if host in hosts]
        if not at_fault:
            raise LaunchError("--preflight", str(finding))
        for host in at_fault:
            excluded.setdefault(host, finding)
    left = {host: slots for host, slots in hosts.items() if host not in excluded}
    if sum(left.values()) < least:
        slots = f"{sum(left.values())} of {sum(hosts.values())} slots are left, and the job needs {least}"
        lines = "".join(f"\n  {host}: {finding}" for host, finding in excluded.items())
        raise LaunchError("--preflight", f"too few hosts passed the checks: {slots}{lines}")
    return left, excluded


# -- hosts ---------------------------------------------------------------------------------------------

# Patterns of ssh's complaints, and what to do; the first that fits counts.
_SSH_REMEDIES = {
    "Could not resolve|not known|Temporary failure in name": "Correct the name, or add the host to DNS, "
    "/etc/hosts or ~/.ssh/config.",
    "Permission denied|Too many authentication": "Set up a login without a password: ssh-copy-id, or name "
    "the key with -i.",
    "Connection refused": "Start an ssh server on the host, or name its port with -p.",
    "timed out|No route|unreachable|no answer|closed by remote|reset by peer": "Check that the host is up, "
    "and that no firewall blocks ssh.",
    "No such file|not found|cannot execute|No module named": "Provide the same environment, with hvdrecover, "
    "at the same path on all hosts: a shared folder, or one image.",
    "": "Log in with `ssh -o BatchMode=yes HOST true`, and repair the reported problem.",
}
_INSTALL = "Run `hvdrecover install-horovod`"
_REBUILD = "Run `hvdrecover install-horovod --rebuild`"

Hosts = Mapping[str, Facts]


def check_versions(hosts: Hosts) -> Finding:
    """All hosts must have the same packages, among them a framework."""
    host, usual = _usual(hosts)
    differences = []
    for package in usual.versions:
        where: dict[str, list[str]] = {}
        for name, each in hosts.items():
            where.setdefault(each.versions.get(package) or "none", []).append(name)
        if len(where) > 1:
            places = ", ".join(f"{version} on {', '.join(names)}" for version, names in where.items())
            differences.append(f"{package}: {places}")
    if differences:
        others = [name for name, each in hosts.items() if each.versions != usual.versions]
        remedy = "Install the same versions on all hosts."
        return Finding(VERSIONS, "failure", "; ".join(differences), remedy, others)
    if not any(usual.versions[framework] for framework in FRAMEWORKS):
        remedy = "Install one: `pip install 'hvdrecover[torch]'` or `pip install 'hvdrecover[tensorflow]'`."
        what = f"neither torch nor tensorflow is installed on {host}"
        return Finding(VERSIONS, "failure", what, remedy)
    everywhere = f" on all {len(hosts)} hosts" if len(hosts) > 1 else ""
    shown = ", ".join(f"{package} {version}" for package, version in usual.versions.items() if version)
    return Finding(VERSIONS, "ok", shown + everywhere)


def _usual(hosts: Hosts) -> tuple[str, Facts]:
    """Return the first host whose versions most hosts have."""
    every = [each.versions for each in hosts.values()]
    return max(hosts.items(), key=lambda item: every.count(item[1].versions))


def check_horovod(hosts: Hosts) -> Iterator[Finding]:
    """All hosts must be able to import Horovod, and it should have all features and our edits."""
    host, usual = _usual(hosts)
    version = usual.versions["horovod"]
    if version is None:
        yield Finding(HOROVOD, "failure", f"Horovod is not installed on {host}", f"{_INSTALL}.")
        return
    has = next((each.features for each in hosts.values() if each.features), {})
    found = list(_import_errors(hosts, any_well=bool(has)))
    if not has.get("gloo", True):
        what = "built without Gloo, so jobs cannot be elastic: a lost process or host restarts the whole job"
        found.append(
            Finding(HOROVOD, "warning", what, f"Use `hvdrecover run --mpi`. {_INSTALL} to get Gloo.")
        )
    if usual.lacks:
        what = f"{version} lacks fixes that recovery needs: {', '.join(usual.lacks)}"
        remedy = f"{_REBUILD}. hvdrecover/install/horovod.edits describes what fails without each fix."
        found.append(Finding(HOROVOD, "warning", what, remedy))
    if not has.get("nccl", True) and any(each.gpus for each in hosts.values()):
        remedy = f"Set HOROVOD_GPU_OPERATIONS=NCCL. {_REBUILD}."
        found.append(Finding(HOROVOD, "warning", "built without NCCL, and the hosts have GPUs", remedy))
    if not found:
        frameworks = " and ".join(f"{by} {usual.versions[by]}" for by in usual.horovod)
        features = ", ".join(f"{'with' if yes else 'without'} {name}" for name, yes in has.items())
        what = f"{version} works with {frameworks}, {features}; it has all of hvdrecover's fixes"
        found.append(Finding(HOROVOD, "ok", what))
    yield from found


def _import_errors(hosts: Hosts, *, any_well: bool) -> Iterator[Finding]:
    """Yield a finding for each framework for which Horovod cannot be imported."""
    for by in FRAMEWORKS:
        answers = {host: each.horovod[by] for host, each in hosts.items() if by in each.horovod}
        errors = {host: error for host, error in answers.items() if error}
        reasons = "; ".join(f"{host}: {error}" for host, error in errors.items())
        what = f"it cannot be imported for {by}: {reasons}"
        remedy = f"{_REBUILD}, which builds it for the installed frameworks."
        if errors and any_well and all("has not been built" in error for error in errors.values()):
            yield Finding(HOROVOD, "warning", what, remedy)
        elif errors:
            at_fault = list(errors) if len(errors) < len(answers) else []
            yield Finding(HOROVOD, "failure", what, remedy, at_fault)


def check_ssh(problems: Mapping[str, str], local: Sequence[str]) -> Iterator[Finding]:
    """All hosts must start this Python when ``horovodrun`` logs in; hosts without a problem have ''."""
    if well := [host for host in problems if host not in local and not problems[host]]:
        yield Finding(SSH, "ok", f"{', '.join(well)}: login works, and this Python starts there")
    elif not any(problems.values()):
        yield Finding(SSH, "skipped", "this host only")
    for host, problem in problems.items():
        if problem:
            fits = (remedy for pattern, remedy in _SSH_REMEDIES.items() if re.search(pattern, problem, re.I))
            yield Finding(SSH, "failure", f"{host}: {problem}", next(fits), [host])


def check_network(own: Mapping[str, tuple[str, str]], reached: Mapping[str, Mapping[str, Any]]) -> Finding:
    """All hosts must connect to each other by interfaces with one name, since Horovod only takes names.

    `own` has each host's interface towards the others and its address, empty if unknown; `reached` has the
    seconds of its connection to each other host, or the error.
    """
    shown = ", ".join(f"{host} {interface} {address}" for host, (interface, address) in own.items())
    broken = {
        (host, other): f"{host} ({own[host][0]}) cannot connect to {other} ({own[other][1]}): {result}"
        for host, results in reached.items()
        for other, result in results.items()
        if isinstance(result, str)
    }
    usual = Counter(interface for interface, _ in own.values()).most_common()[0][0]
    if without := [host for host, (interface, _) in own.items() if not interface]:
        what = f"no interface of {', '.join(without)} leads to the other hosts"
        return Finding(NETWORK, "failure", what, "Name the right one with --network-interface.", without)
    if broken:
        remedy = "Allow connections between the hosts on all ports, or name another --network-interface."
        at_fault = _to_leave_out([*own], set(broken))
        return Finding(NETWORK, "failure", "; ".join(broken.values()), remedy, at_fault)
    if others := [host for host, (interface, _) in own.items() if interface != usual]:
        what = f"the interfaces that connect the hosts have different names: {shown}"
        return Finding(NETWORK, "failure", what, "Give the interface the same name on all hosts.", others)
    slowest = max(seconds for results in reached.values() for seconds in results.values())
    return Finding(NETWORK, "ok", f"all connect to all within {slowest * 1e3:.1f} ms: {shown}")


def _to_leave_out(hosts: Sequence[str], broken: set[tuple[str, str]]) -> list[str]:
    """Return hosts without which all connect to all: repeatedly that with the most broken connections."""
    found = []
    while broken:
        counts = Counter(host for pair in broken for host in pair)
        # Of several hosts it is the last one, since rank 0 is on the first.
        worst = max(reversed(hosts), key=lambda host: counts[host])
        found.append(worst)
        broken = {pair for pair in broken if worst not in pair}
    return found


def check_clocks(ahead: Mapping[str, float], error: float) -> Finding:
    """All clocks should agree, by the seconds that each is ahead of one clock, each wrong by ``error``."""
    first = next(iter(ahead))
    ahead = {host: seconds - ahead[first] for host, seconds in ahead.items()}
    wrong = 2 * error  # of a difference, at most
    spread = max(ahead.values()) - min(ahead.values()) - wrong  # the certain part, on a slow network
    if spread <= MOST_SKEW:
        what = f"at most {max(map(abs, ahead.values())):.2f} s apart (± {wrong:.2f} s)"
        return Finding(CLOCKS, "ok", what)
    shown = ", ".join(f"{host} {seconds:+.1f} s" for host, seconds in ahead.items() if host != first)
    what = f"compared with {first}: {shown} (± {wrong:.1f} s)"
    remedy = "Synchronise all clocks with the same time server (chrony, systemd-timesyncd)."
    if spread <= REFUSED_SKEW:
        return Finding(CLOCKS, "warning", what, remedy)
    # Most clocks are right, so those at fault are far from the median; of two hosts the first is right.
    usual = statistics.median_low([0.0, *ahead.values()])
    at_fault = [host for host, seconds in ahead.items() if abs(seconds - usual) > REFUSED_SKEW / 2]
    return Finding(CLOCKS, "failure", what, remedy, at_fault)


def check_memory(hosts: Hosts, ranks: Mapping[str, int], state: int | None) -> Finding:
    """All hosts need memory for the copies of the state in commits."""
    largest = {host: each.memory // (BUFFERS * ranks[host]) for host, each in hosts.items()}
    shown = ", ".join(f"{size(nbytes)} on {host}" for host, nbytes in largest.items())
    what = f"enough for a state of {shown}: a commit takes up to {BUFFERS} copies of the state on each rank"
    tight = [host for host, nbytes in largest.items() if state is not None and nbytes < state]
    if state is None or not tight:
        return Finding(MEMORY, "ok", what)
    remedy = f"Free memory on {', '.join(tight)}, or use fewer slots, larger hosts or a larger cgroup."
    too_small = [host for host in tight if hosts[host].memory < state * ranks[host]]
    return Finding(MEMORY, "failure" if too_small else "warning", what, remedy, too_small)


# -- storage -------------------------------------------------------------------------------------------


def check_root(found: Mapping[str, Any], now: float) -> Finding:
    """The root should hold usable commits, or none."""
    url, newest = found["url"], found["newest"]
    listed = ", ".join(f"{count} {state}" for state, count in found["commits"].items())
    if not listed:
        return Finding(ROOT, "ok", f"{url}: no commits yet")
    if newest is None:
        remedy = f"Look at it with `hvdrecover verify {url}`; repair it, or name another root."
        return Finding(ROOT, "failure", f"{url}: no commit is usable: {listed}", remedy)
    minutes = max(0.0, now - newest["time"]) / 60
    what = f"{url}: {listed}; a job resumes from {newest['commit']}, which is {minutes:.0f} min old"
    if found["broken"]:
        remedy = f"Look at it with `hvdrecover ls {url}`. Jobs skip broken commits."
        return Finding(ROOT, "warning", what, remedy)
    return Finding(ROOT, "ok", what)


def check_writing(problem: str, host: str) -> Finding:
    """The root must return the bytes that were written."""
    if problem:
        remedy = "Check the root, the permissions and the storage."
        return Finding(WRITING, "failure", f"{host}: {problem}", remedy, [host])
    return Finding(WRITING, "ok", f"{host} wrote a file and read the same bytes")


def check_shared(seen: Mapping[str, bool | LaunchError], writer: str) -> Finding:
    """All hosts should see the file that the writer wrote, since rank 0 may move to any host."""
    if not seen:
        return Finding(SHARED, "skipped", "no other host answers")
    if broken := [str(error) for error in seen.values() if isinstance(error, LaunchError)]:
        remedy = "Give these hosts the same access to the root: packages, credentials, mounts."
        return Finding(SHARED, "failure", f"not all hosts can open the root: {'; '.join(broken)}", remedy)
    if blind := [host for host, sees in seen.items() if not sees]:
        what = f"{', '.join(blind)} cannot see the file that {writer} wrote"
        remedy = "Use a folder that all hosts share, or an object store. Rank 0 may move to any host."
        return Finding(SHARED, "warning", what, remedy)
    return Finding(SHARED, "ok", f"{', '.join(seen)} can see the file that {writer} wrote")


def check_space(free: int | None, state: int | None) -> Finding:
    """The root needs space for the commits that it keeps."""
    if free is None:
        return Finding(SPACE, "skipped", "this storage does not report free space")
    fits = f"enough for a state of {size(free / COMMITS)}: by default, a root has up to {COMMITS} commits"
    what = f"{size(free)} free, {fits}"
    if state is None or free >= COMMITS * state:
        return Finding(SPACE, "ok", what)
    remedy = "Free space, keep fewer commits (Checkpoint(keep=...)), or name a larger root."
    return Finding(SPACE, "failure" if free < state else "warning", what, remedy)
