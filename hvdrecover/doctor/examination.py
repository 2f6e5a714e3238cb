"""All checks, in order: ask the hosts, and pass the answers to ``hosts.py`` and ``storage.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.doctor import hosts as checks
from hvdrecover.doctor import storage
from hvdrecover.doctor.agents import Agents, passed_on
from hvdrecover.doctor.findings import Finding, checked, host_failure, skipped
from hvdrecover.doctor.host import Facts
from hvdrecover.doctor.hosts import Reached, Reading
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.install.process import ended_by_exception

# Seconds after which an answer counts as missing.
_LOGIN = 60.0  # ssh, and the start of Python
_QUESTION = 30.0
_LOADING = 240.0  # importing all frameworks
_STORAGE = 120.0
_READINGS = 5  # of each clock


@dataclass(frozen=True)
class Settings:
    """What to examine.

    Attributes:
        hosts: host to its number of slots, in the order in which a job would use them.
        processes: how many ranks the job would have.
        interfaces: network interfaces that the job would use; empty if any.
        ssh_port: port of the ssh servers, or None for the default of ssh.
        identity: file of ssh's private key, or None.
        checkpoint: the checkpoint root, or None.
        state: size of the training state in bytes, or None if unknown.
    """

    hosts: Mapping[str, int]
    processes: int
    interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    identity: str | None = None
    checkpoint: str | None = None
    state: int | None = None

    def ranks(self) -> dict[str, int]:
        """Return host to its number of ranks. The first hosts are filled first.

        Raises:
            ConfigError: the hosts have too few slots.
        """
        left, found = self.processes, {}
        for host, slots in self.hosts.items():
            if left > 0:
                found[host] = min(slots, left)
                left -= found[host]
        if left > 0:
            slots = sum(self.hosts.values())
            raise ConfigError("-np", f"{self.processes} processes are more than the hosts' {slots} slots")
        return found


@dataclass(frozen=True)
class Report:
    """The result of all checks.

    Attributes:
        ok: whether there is no failure.
        ranks: host to its number of ranks.
        findings: the result of each check, in the order of the checks.
        answers: question to host to its answer, for programs.
    """

    ok: bool
    ranks: Mapping[str, int]
    findings: Sequence[Finding]
    answers: Mapping[str, Mapping[str, Any]]


def examine(
    settings: Settings, clock: Clock, notify: Callable[[str], None], *, hosts_only: bool = False
) -> Report:
    """Make all checks.

    Args:
        settings: what to examine.
        clock: the clock with which those of other hosts are compared.
        notify: called with the topic of the next checks.
        hosts_only: leave out storage and memory, as ``hvdrecover run --preflight`` does.

    Raises:
        ConfigError: the hosts have too few slots.
        LaunchError: no process can be started on this host.
    """
    ranks = settings.ranks()
    with ended_by_exception(), Agents(list(ranks), settings.ssh_port, settings.identity) as agents:
        examination = _Examination(settings, ranks, agents, clock, notify)
        findings = list(examination.hosts())
        if not hosts_only:
            findings += examination.storage()
        ok = all(finding.outcome != "failure" for finding in findings)
        return Report(ok, ranks, findings, agents.answers)


class _Examination:
    """The conversation with all hosts. Only hosts that answer the first question are asked more."""

    def __init__(
        self,
        settings: Settings,
        ranks: Mapping[str, int],
        agents: Agents,
        clock: Clock,
        notify: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._agents = agents
        self._clock = clock
        self._notify = notify
        self._facts: dict[str, Facts] = {}

    def hosts(self) -> Iterator[Finding]:
        self._notify("hosts")
        yield from checks.check_ssh(self._gather_facts(), self._agents.local)
        if not self._facts:
            return
        yield from checked(checks.VERSIONS, lambda: checks.check_versions(self._facts))
        self._notify("Horovod")
        yield from checked(checks.HOROVOD, self._horovod)
        self._notify("network")
        between: dict[str, Callable[[], Finding]] = {
            checks.NAMES: lambda: checks.check_names(self._resolved()),
            checks.NETWORK: self._network,
            checks.CLOCKS: self._clocks,
        }
        lost = len(self._facts) < len(self._ranks)
        alone = "it takes two hosts that answer" if lost else "this host only"
        for check, look in between.items():
            if len(self._facts) > 1 and not set(self._facts) <= set(self._agents.local):
                yield from checked(check, look)
            else:
                yield skipped(check, alone)

    def storage(self) -> Iterator[Finding]:
        self._notify("storage")
        yield from checked(storage.ROOT, self._root)
        if self._facts:
            state = self._settings.state
            yield from checked(checks.MEMORY, lambda: checks.check_memory(self._facts, self._ranks, state))
            yield from checked(storage.NEAR, self._near)

    def _gather_facts(self) -> dict[str, str]:
        """Ask all hosts for their facts; returns each host's problem, or an empty string."""
        remote = [host for host in self._ranks if host not in self._agents.local]
        self._agents.ask("adopt", dict.fromkeys(remote, (passed_on(),)), _LOGIN)
        answers = self._agents.ask("facts", dict.fromkeys(self._ranks, ()), _LOGIN)
        problems = {}
        for host, answer in answers.items():
            problems[host] = answer.problem if isinstance(answer, LaunchError) else ""
            if not isinstance(answer, LaunchError):
                self._facts[host] = Facts(**answer)
        return problems

    def _horovod(self) -> Iterator[Finding]:
        asked = {}
        for host, each in self._facts.items():
            if each.versions["horovod"]:
                asked[host] = ([framework for framework in checks.FRAMEWORKS if each.versions[framework]],)
        loaded = self._agents.require("load", asked, _LOADING)
        yield from checks.check_horovod(self._facts, loaded)

    def _resolved(self) -> dict[str, Any]:
        names = list(self._facts)
        return self._agents.require("resolve", dict.fromkeys(names, (names,)), _QUESTION)

    def _network(self) -> Finding:
        own = self._interfaces()
        peers = {
            host: ({peer: (own[peer][1], each.port) for peer, each in self._facts.items() if peer != host},)
            for host in self._facts
        }
        reached = self._agents.require("reach", peers, _QUESTION)
        return checks.check_network({host: Reached(*own[host], reached[host]) for host in self._facts})

    def _interfaces(self) -> dict[str, tuple[str, str]]:
        """Return host to the interface that leads to the other hosts, and its address."""
        found = dict.fromkeys(self._facts, ("", ""))
        if wanted := self._settings.interfaces:
            for host, each in self._facts.items():
                usable = ((name, each.interfaces[name]) for name in wanted if name in each.interfaces)
                found[host] = next(usable, ("", ""))
            return found
        addresses = checks.addresses(self._resolved())
        # If the other hosts do not know a host's name, the first round finds its address for the second one.
        for _ in range(2):
            others = {host: [a for peer, a in addresses.items() if peer != host] for host in self._facts}
            asked = {host: (each[0],) for host, each in others.items() if each}
            for host, (interface, address) in self._agents.require("route", asked, _QUESTION).items():
                found[host] = interface, address
                if address:
                    addresses.setdefault(host, address)
        return found

    def _clocks(self) -> Finding:
        offsets = {}
        for host in self._facts:
            readings = []
            for _ in range(_READINGS):
                asked = self._clock.now()
                read = self._agents.require("clock", {host: ()}, _QUESTION)[host]
                readings.append(Reading(asked, read, self._clock.now()))
            offsets[host] = checks.offset(readings)
        return checks.check_clocks(offsets)

    def _near(self) -> Finding:
        asked = dict.fromkeys(self._facts, (self._settings.checkpoint,))
        found = self._agents.require("near", asked, _QUESTION)
        return storage.check_near(found, self._settings.state)

    def _root(self) -> Iterator[Finding]:
        """Try out the root from the first host, where rank 0 would write."""
        url, host = self._settings.checkpoint, next(iter(self._ranks))
        if url is None:
            yield skipped(storage.ROOT, "no root is named; --checkpoint or HVDRECOVER_CHECKPOINT names it")
            return
        if host not in self._facts:
            yield skipped(storage.ROOT, f"{host}, which would write to it, does not answer")
            return
        found = self._agents.ask("root", {host: (url,)}, _STORAGE)[host]
        if isinstance(found, LaunchError):
            yield host_failure(storage.ROOT, found, "Check the URL, and install the packages that it needs.")
            return
        yield storage.check_root(found, self._clock.now())
        yield from checked(storage.WRITING, lambda: self._trial(url, host, found["path"]))
        yield storage.check_space(found["free"], self._settings.state)
        cleaned = self._agents.ask("clean", {host: ()}, _STORAGE)[host]
        if isinstance(cleaned, LaunchError):
            remedy = "Delete the folder .hvdrecover-doctor-* at the root."
            yield replace(host_failure(storage.CLEANING, cleaned), remedy=remedy)

    def _trial(self, url: str, host: str, path: str) -> Iterator[Finding]:
        for check, question in ((storage.WRITING, "write"), (storage.CLAIMS, "create")):
            found = self._agents.ask(question, {host: ()}, _STORAGE)[host]
            if isinstance(found, LaunchError):
                yield host_failure(check, found, "Check the root, the permissions and the storage.")
                return
            yield storage.check_writing(found, host) if question == "write" else storage.check_creating(found)
        seen = self._agents.ask("see", {each: (url, path) for each in self._facts if each != host}, _STORAGE)
        told = {each: it.problem if isinstance(it, LaunchError) else bool(it) for each, it in seen.items()}
        yield storage.check_shared(told, host)
