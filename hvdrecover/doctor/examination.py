"""All checks of the doctor: ask the hosts, and draw findings from their answers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hvdrecover import config
from hvdrecover.checkpoint import Keep
from hvdrecover.checkpoint.near_tier import size
from hvdrecover.discovery.discover import command_on
from hvdrecover.discovery.selection import Checks
from hvdrecover.doctor.host import FRAMEWORKS, MARK, Facts
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.launch import processes, ssh
from hvdrecover.machine import is_local

MOST_SKEW = 1.0  # seconds; with more, ages of commits and of claims are wrong
BUFFERS = 2  # copies of the state on each rank, at most: the newest commit, and one that is being written
COMMITS = Keep().last + 1  # commits at a root by default, and one that is being written
_CONNECT = 15.0  # seconds for a busy host's ssh server to answer
_NEEDED = ("PYTHONPATH", "LD_LIBRARY_PATH")  # to start Python; the other variables come with the question
_NOT_PASSED_ON = ("BASH_FUNC_", "OLDPWD", "SSH_")  # variables that `horovodrun` keeps from other hosts
# Seconds after which an answer counts as missing.
_FACTS = 300.0  # ssh, the start of Python, and importing all frameworks
_QUESTION = 30.0
_STORAGE = 120.0
# With a failure, a job cannot run. With a warning it can, with a disadvantage. Skipped: not possible.
Outcome = Literal["ok", "warning", "failure", "skipped"]


@dataclass(frozen=True)
class Finding:
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
    """Leave out the hosts at fault; return the other hosts, and the first failure of each excluded host."""
    excluded: dict[str, Finding] = {}
    for finding in (each for each in findings if each.outcome == "failure"):
        if not finding.at_fault:
            raise LaunchError("--preflight", str(finding))
        for host in finding.at_fault:
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
    "cannot be started": "Install an ssh client on this host, such as Debian's openssh-client.",
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
        return Finding("versions", "failure", "; ".join(differences), remedy, others)
    if not any(usual.versions[framework] for framework in FRAMEWORKS):
        remedy = "Install one: `pip install 'hvdrecover[torch]'` or `pip install 'hvdrecover[tensorflow]'`."
        what = f"neither torch nor tensorflow is installed on {host}"
        return Finding("versions", "failure", what, remedy)
    everywhere = f" on all {len(hosts)} hosts" if len(hosts) > 1 else ""
    shown = ", ".join(f"{package} {version}" for package, version in usual.versions.items() if version)
    return Finding("versions", "ok", shown + everywhere)


def _usual(hosts: Hosts) -> tuple[str, Facts]:
    every = [each.versions for each in hosts.values()]
    return max(hosts.items(), key=lambda item: every.count(item[1].versions))


def check_horovod(hosts: Hosts) -> Iterator[Finding]:
    """All hosts must be able to import Horovod, and it should have all features and our edits."""
    host, usual = _usual(hosts)
    version = usual.versions["horovod"]
    if version is None:
        yield Finding("horovod", "failure", f"Horovod is not installed on {host}", f"{_INSTALL}.")
        return
    has = next((each.features for each in hosts.values() if each.features), {})
    found = list(_import_errors(hosts, any_well=bool(has)))
    if not has.get("gloo", True):
        what = "built without Gloo, so jobs cannot be elastic: a lost process or host restarts the whole job"
        remedy = f"Use `hvdrecover run --mpi`. {_INSTALL} to get Gloo."
        found.append(Finding("horovod", "warning", what, remedy))
    if usual.lacks:
        what = f"{version} lacks fixes that recovery needs: {', '.join(usual.lacks)}"
        remedy = f"{_REBUILD}. hvdrecover/install/horovod.edits describes what fails without each fix."
        found.append(Finding("horovod", "warning", what, remedy))
    if not has.get("nccl", True) and any(each.gpus for each in hosts.values()):
        remedy = f"Set HOROVOD_GPU_OPERATIONS=NCCL. {_REBUILD}."
        found.append(Finding("horovod", "warning", "built without NCCL, and the hosts have GPUs", remedy))
    if not found:
        frameworks = " and ".join(f"{by} {usual.versions[by]}" for by in usual.horovod)
        features = ", ".join(f"{'with' if yes else 'without'} {name}" for name, yes in has.items())
        what = f"{version} works with {frameworks}, {features}; it has all of hvdrecover's fixes"
        found.append(Finding("horovod", "ok", what))
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
            yield Finding("horovod", "warning", what, remedy)
        elif errors:
            at_fault = list(errors) if len(errors) < len(answers) else []
            yield Finding("horovod", "failure", what, remedy, at_fault)


def check_ssh(problems: Mapping[str, str], local: Sequence[str]) -> Iterator[Finding]:
    """All hosts must start this Python when ``horovodrun`` logs in; hosts without a problem have ''."""
    if well := [host for host in problems if host not in local and not problems[host]]:
        yield Finding("ssh", "ok", f"{', '.join(well)}: login works, and this Python starts there")
    elif not any(problems.values()):
        yield Finding("ssh", "skipped", "this host only")
    for host, problem in problems.items():
        if problem:
            fits = (remedy for pattern, remedy in _SSH_REMEDIES.items() if re.search(pattern, problem, re.I))
            yield Finding("ssh", "failure", f"{host}: {problem}", next(fits), [host])


def check_network(own: Mapping[str, tuple[str, str]], reached: Mapping[str, Mapping[str, Any]]) -> Finding:
    """All hosts must connect to each other by interfaces with one name, since Horovod only takes names."""
    # own: host to interface and address, '' if unknown. reached: host to other host to seconds or error.
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
        return Finding("network", "failure", what, "Name the right one with --network-interface.", without)
    if broken:
        remedy = "Allow connections between the hosts on all ports, or name another --network-interface."
        at_fault = _to_leave_out([*own], set(broken))
        return Finding("network", "failure", "; ".join(broken.values()), remedy, at_fault)
    if others := [host for host, (interface, _) in own.items() if interface != usual]:
        what = f"the interfaces that connect the hosts have different names: {shown}"
        return Finding("network", "failure", what, "Give the interface the same name on all hosts.", others)
    slowest = max(seconds for results in reached.values() for seconds in results.values())
    return Finding("network", "ok", f"all connect to all within {slowest * 1e3:.1f} ms: {shown}")


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
        return Finding("clocks", "ok", what)
    shown = ", ".join(f"{host} {seconds:+.1f} s" for host, seconds in ahead.items() if host != first)
    what = f"compared with {first}: {shown} (± {wrong:.1f} s)"
    # Servers refuse clients whose clocks are far off: Kerberos from 5 minutes on, S3 from 15.
    remedy = "Synchronise all clocks with the same time server (chrony, systemd-timesyncd)."
    return Finding("clocks", "warning", what, remedy)


def check_memory(hosts: Hosts, ranks: Mapping[str, int], state: int | None) -> Finding:
    largest = {host: each.memory // (BUFFERS * ranks[host]) for host, each in hosts.items()}
    shown = ", ".join(f"{size(nbytes)} on {host}" for host, nbytes in largest.items())
    what = f"enough for a state of {shown}: a commit takes up to {BUFFERS} copies of the state on each rank"
    tight = [host for host, nbytes in largest.items() if state is not None and nbytes < state]
    if state is None or not tight:
        return Finding("host memory", "ok", what)
    remedy = f"Free memory on {', '.join(tight)}, or use fewer slots, larger hosts or a larger cgroup."
    too_small = [host for host in tight if hosts[host].memory < state * ranks[host]]
    return Finding("host memory", "failure" if too_small else "warning", what, remedy, too_small)


# -- storage -------------------------------------------------------------------------------------------


def check_root(found: Mapping[str, Any], now: float) -> Finding:
    """The root should hold usable commits, or none."""
    url, newest = found["url"], found["newest"]
    listed = ", ".join(f"{count} {state}" for state, count in found["commits"].items())
    if not listed:
        return Finding("checkpoint root", "ok", f"{url}: no commits yet")
    if newest is None:
        remedy = f"Look at it with `hvdrecover verify {url}`; repair it, or name another root."
        return Finding("checkpoint root", "failure", f"{url}: no commit is usable: {listed}", remedy)
    minutes = max(0.0, now - newest["time"]) / 60
    what = f"{url}: {listed}; a job resumes from {newest['commit']}, which is {minutes:.0f} min old"
    if found["commits"].keys() - {"complete", "finished", "incomplete"}:
        remedy = f"Look at it with `hvdrecover ls {url}`. Jobs skip broken commits."
        return Finding("checkpoint root", "warning", what, remedy)
    return Finding("checkpoint root", "ok", what)


def check_writing(problem: str, host: str) -> Finding:
    """The root must return the bytes that were written."""
    if problem:
        remedy = "Check the root, the permissions and the storage."
        return Finding("root: writing", "failure", f"{host}: {problem}", remedy, [host])
    return Finding("root: writing", "ok", f"{host} wrote a file and read the same bytes")


def check_shared(seen: Mapping[str, bool | LaunchError], writer: str) -> Finding:
    """All hosts should see the file that the writer wrote, since rank 0 may move to any host."""
    if not seen:
        return Finding("root: shared", "skipped", "no other host answers")
    if broken := [str(error) for error in seen.values() if isinstance(error, LaunchError)]:
        remedy = "Give these hosts the same access to the root: packages, credentials, mounts."
        what = f"not all hosts can open the root: {'; '.join(broken)}"
        return Finding("root: shared", "failure", what, remedy)
    if blind := [host for host, sees in seen.items() if not sees]:
        what = f"{', '.join(blind)} cannot see the file that {writer} wrote"
        remedy = "Use a folder that all hosts share, or an object store. Rank 0 may move to any host."
        return Finding("root: shared", "warning", what, remedy)
    return Finding("root: shared", "ok", f"{', '.join(seen)} can see the file that {writer} wrote")


def check_space(free: int | None, state: int | None) -> Finding:
    if free is None:
        return Finding("root: space", "skipped", "this storage does not report free space")
    fits = f"enough for a state of {size(free / COMMITS)}: by default, a root has up to {COMMITS} commits"
    what = f"{size(free)} free, {fits}"
    if state is None or free >= COMMITS * state:
        return Finding("root: space", "ok", what)
    remedy = "Free space, keep fewer commits (Checkpoint(keep=...)), or name a larger root."
    return Finding("root: space", "failure" if free < state else "warning", what, remedy)


# -- the examination ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    hosts: Mapping[str, int]  # host to its number of slots, in the order in which a job would use them
    processes: int  # number of ranks of the job
    interfaces: tuple[str, ...] = ()  # network interfaces that the job would use; empty if any
    ssh_port: int | None = None  # None for the default of ssh
    identity: str | None = None  # file of ssh's private key
    checkpoint: str | None = None  # the checkpoint root
    state: int | None = None  # size of the training state in bytes; None if unknown

    def ranks(self) -> dict[str, int]:
        """Return host to its number of ranks; the first hosts are filled first."""
        left, found = self.processes, {}
        for host, slots in self.hosts.items():
            if left > 0:
                found[host] = min(slots, left)
                left -= found[host]
        if left > 0:
            slots = sum(self.hosts.values())
            raise ConfigError("-np", f"{self.processes} processes are more than the hosts' {slots} slots")
        return found


def examine(settings: Settings, *, hosts_only: bool = False) -> list[Finding]:
    """Make all checks; ``hosts_only`` leaves out storage and memory, as ``run --preflight`` does."""
    examination = Examination(settings)
    findings = list(examination.hosts())
    return findings if hosts_only else [*findings, *examination.storage()]


class Examination:
    """The conversation with all hosts. Only hosts that answer the first question are asked more."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ranks = settings.ranks()
        self._local = [name for name in self._ranks if is_local(name)]  # names of this host: without ssh
        self._facts: dict[str, Facts] = {}

    def hosts(self) -> Iterator[Finding]:
        answers = self._ask("facts", {host: (host, [*self._ranks]) for host in self._ranks}, _FACTS)
        problems = {h: each.problem if isinstance(each, LaunchError) else "" for h, each in answers.items()}
        self._facts = {host: Facts(**answers[host]) for host, problem in problems.items() if not problem}
        yield from check_ssh(problems, self._local)
        if not self._facts:
            return
        yield check_versions(self._facts)
        yield from check_horovod(self._facts)
        for check, look in (("network", self._network), ("clocks", self._clocks)):
            if len(self._facts) < 2 or set(self._facts) <= set(self._local):
                lost = len(self._facts) < len(self._ranks)
                why = "it takes two hosts that answer" if lost else "this host only"
                yield Finding(check, "skipped", why)
                continue
            try:
                yield look()
            except LaunchError as error:
                remedy = "Repair this host, then run `hvdrecover doctor` again."
                yield Finding(check, "failure", str(error).rstrip("."), remedy, [error.program])

    def _network(self) -> Finding:
        own = {host: self._interface(host) for host in self._facts}
        ports = {host: (own[host][1], each.port) for host, each in self._facts.items()}
        asked = {
            host: (port, {peer: place for peer, place in ports.items() if peer != host})
            for host, (_, port) in ports.items()
        }
        return check_network(own, self._ask_all("reach", asked))

    def _interface(self, host: str) -> tuple[str, str]:
        """Return a host's interface that leads to the other hosts, and its address; empty if unknown."""
        facts = self._facts[host]
        if wanted := self._settings.interfaces:
            name = next((each for each in wanted if each in facts.interfaces), "")
            return name, facts.interfaces.get(name, "")
        # A host that does not know the other hosts' names may be known to them.
        known = [each.addresses[host] for each in self._facts.values() if host in each.addresses]
        address = next(filter(None, [facts.source, *known]), "")
        return next((name for name, each in facts.interfaces.items() if each == address), ""), address

    def _clocks(self) -> Finding:
        """Read all clocks. Each was read between question and answer, so their middle is close to it."""
        asked = time.time()
        read = self._ask_all("clock", dict.fromkeys(self._facts, ()))
        error = (time.time() - asked) / 2
        return check_clocks({host: each - asked - error for host, each in read.items()}, error)

    def storage(self) -> Iterator[Finding]:
        """Try out the root from the first host, where rank 0 would write; then check the memory."""
        url, host = self._settings.checkpoint, next(iter(self._ranks))
        if url is None:
            what = "no root is named; --checkpoint or HVDRECOVER_CHECKPOINT names it"
            yield Finding("checkpoint root", "skipped", what)
        elif host not in self._facts:
            what = f"{host}, which would write to it, does not answer"
            yield Finding("checkpoint root", "skipped", what)
        else:
            yield from self._root(url, host)
        if self._facts:
            yield check_memory(self._facts, self._ranks, self._settings.state)

    def _root(self, url: str, host: str) -> Iterator[Finding]:
        found = self._ask("root", {host: (url,)}, _STORAGE)[host]
        if isinstance(found, LaunchError):
            remedy = "Check the URL, and install the packages that it needs."
            yield Finding("checkpoint root", "failure", str(found).rstrip("."), remedy, [host])
            return
        asked = {each: (url, found["folder"]) for each in self._facts if each != host}
        seen = {} if found["problem"] else self._ask("see", asked, _STORAGE)
        cleaned = self._ask("clean", {host: (url, found["folder"], found["made"])}, _STORAGE)[host]
        if isinstance(cleaned, LaunchError) and not found["problem"]:
            found["problem"] = f"its test files cannot be deleted ({cleaned.problem})"
        yield check_root(found, time.time())
        yield check_writing(found["problem"], host)
        yield check_space(found["free"], self._settings.state)
        if not found["problem"]:
            yield check_shared(seen, host)

    # -- questions -------------------------------------------------------------------------------------

    def _ask_all(self, question: str, about: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
        """Return the answers of hosts. Raise the LaunchError of one that has not answered."""
        answers = self._ask(question, about, _QUESTION)
        if error := next((each for each in answers.values() if isinstance(each, LaunchError)), None):
            raise error
        return answers

    def _ask(self, question: str, about: Mapping[str, Sequence[Any]], seconds: float) -> dict[str, Any]:
        """Ask several hosts at the same time; return host to its answer, or to its LaunchError."""
        with ThreadPoolExecutor(max(1, len(about))) as pool:
            answers = pool.map(lambda name: self._ask_one(name, question, about[name], seconds), about)
            return dict(zip(about, answers, strict=True))

    def _ask_one(self, name: str, question: str, about: Sequence[Any], seconds: float) -> Any:
        here, settings, environ = name in self._local, config.read(), config.environment()
        # The same Python in the same folder, if that exists there.
        variables = [f"{needed}={environ[needed]}" for needed in _NEEDED if needed in environ]
        python = shlex.join(["env", *variables, sys.executable, "-m", "hvdrecover.doctor.host"])
        command = f"cd {shlex.quote(os.fspath(Path.cwd()))} 2>/dev/null; exec {python}"
        login = Checks(self._settings.ssh_port, self._settings.identity, command)
        # As `horovodrun` starts a rank, so this tests ssh itself.
        words = command_on(name, login, here=here, seconds=_CONNECT)
        if settings.remote_shell and not here:  # instead of ssh, as for ranks
            words = [*ssh.remote_shell(settings.remote_shell, settings.path), *words[1:]]
        passed_on = {k: v for k, v in environ.items() if not here and not k.startswith(_NOT_PASSED_ON)}
        asked, pipe = {"variables": passed_on, "ask": question, "about": about}, subprocess.PIPE
        try:
            process = processes.start(words, environ, stdin=pipe, stdout=pipe, stderr=pipe)
        except OSError as error:
            return LaunchError(name, f"{words[0]} cannot be started: {error.strerror}")
        try:
            printed = process.communicate(json.dumps(asked).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return LaunchError(name, f"no answer in {seconds:.0f} s")
        finally:
            process.kill_group()
            process.ends()
        output, errors = (
            [line.strip() for line in each.decode(errors="replace").split("\n")] for each in printed
        )
        for line in output:  # login scripts may print other lines
            if line.startswith(MARK):
                message = json.loads(line.removeprefix(MARK))
                return LaunchError(name, message["error"]) if "error" in message else message["answer"]
        ended = f"its process ended with {processes.describe(process.wait())}"
        return LaunchError(name, next((line for line in reversed(errors) if line), ended))
