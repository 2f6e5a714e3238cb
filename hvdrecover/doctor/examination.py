"""All checks, in order: ask the hosts, and pass the answers to ``hosts.py`` and ``storage.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.doctor import hosts as checks
from hvdrecover.doctor import storage
from hvdrecover.doctor.agents import Agents
from hvdrecover.doctor.findings import Finding, host_failure, skipped
from hvdrecover.doctor.host import Facts
from hvdrecover.doctor.hosts import Reached
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.install.process import ended_by_exception

# Seconds after which an answer counts as missing.
_FACTS = 300.0  # ssh, the start of Python, and importing all frameworks
_QUESTION = 30.0
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
    """The result of all checks."""

    ok: bool
    ranks: Mapping[str, int]
    findings: Sequence[Finding]
    answers: Mapping[str, Mapping[str, Any]]  # question to host to its answer, for programs


def examine(
    settings: Settings, clock: Clock, notify: Callable[[str], None], *, hosts_only: bool = False
) -> Report:
    """Make all checks; ``hosts_only`` leaves out storage and memory, as ``run --preflight`` does."""
    ranks = settings.ranks()
    agents = Agents([*ranks], settings.ssh_port, settings.identity)
    with ended_by_exception():
        examination = _Examination(settings, agents, clock)
        notify("hosts")
        findings = list(examination.hosts())
        if not hosts_only:
            notify("storage")
            findings += examination.storage()
        ok = all(finding.outcome != "failure" for finding in findings)
        return Report(ok, ranks, findings, agents.answers)


class _Examination:
    """The conversation with all hosts. Only hosts that answer the first question are asked more."""

    def __init__(self, settings: Settings, agents: Agents, clock: Clock) -> None:
        self._settings = settings
        self._ranks = settings.ranks()
        self._agents = agents
        self._clock = clock
        self._facts: dict[str, Facts] = {}

    def hosts(self) -> Iterator[Finding]:
        local, problems = self._agents.local, {}
        asked = {host: (host, [*self._ranks]) for host in self._ranks}
        for host, answer in self._agents.ask("facts", asked, _FACTS).items():
            problems[host] = answer.problem if isinstance(answer, LaunchError) else ""
            if not problems[host]:
                self._facts[host] = Facts(**answer)
        yield from checks.check_ssh(problems, local)
        if not self._facts:
            return
        yield checks.check_versions(self._facts)
        yield from checks.check_horovod(self._facts)
        for check, look in ((checks.NETWORK, self._network), (checks.CLOCKS, self._clocks)):
            if len(self._facts) < 2 or set(self._facts) <= set(local):
                lost = len(self._facts) < len(self._ranks)
                yield skipped(check, "it takes two hosts that answer" if lost else "this host only")
                continue
            try:
                yield look()
            except LaunchError as error:
                yield host_failure(check, error)

    def storage(self) -> Iterator[Finding]:
        yield from self._root()
        if not self._facts:
            return
        state = self._settings.state
        yield checks.check_memory(self._facts, self._ranks, state)
        try:
            asked = dict.fromkeys(self._facts, (self._settings.checkpoint,))
            yield storage.check_near(self._agents.require("near", asked, _QUESTION), state)
        except LaunchError as error:
            yield host_failure(storage.NEAR, error)

    def _network(self) -> Finding:
        own = {host: self._interface(host) for host in self._facts}
        asked = {
            host: (
                facts.port,
                {peer: (own[peer][1], each.port) for peer, each in self._facts.items() if peer != host},
            )
            for host, facts in self._facts.items()
        }
        reached = self._agents.require("reach", asked, _QUESTION)
        return checks.check_network({host: Reached(*own[host], reached[host]) for host in self._facts})

    def _interface(self, host: str) -> tuple[str, str]:
        """Return a host's interface that leads to the other hosts, and its address; empty if unknown."""
        facts = self._facts[host]
        if wanted := self._settings.interfaces:
            return next(
                ((each, facts.interfaces[each]) for each in wanted if each in facts.interfaces), ("", "")
            )
        # A host that does not know the other hosts' names may be known to them.
        known = [each.addresses[host] for each in self._facts.values() if host in each.addresses]
        address = next(filter(None, [facts.source, *known]), "")
        return next((name for name, each in facts.interfaces.items() if each == address), ""), address

    def _clocks(self) -> Finding:
        """Read each clock several times.

        A clock was read somewhere between question and answer, so their middle is wrong by at most half of
        the time between them. The quickest reading is the most exact (F. Cristian, Probabilistic clock
        synchronization, Distributed Computing 3, 1989).
        """
        offsets = {}
        for host in self._facts:
            readings = []
            for _ in range(_READINGS):
                asked = self._clock.now()
                read = self._agents.require("clock", {host: ()}, _QUESTION)[host]
                error = (self._clock.now() - asked) / 2
                readings.append((error, read - asked - error))
            error, ahead = min(readings)
            offsets[host] = ahead, error
        return checks.check_clocks(offsets)

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
        try:
            yield storage.check_root(found, self._clock.now())
            yield from storage.check_writing(found, host)
            yield storage.check_space(found["free"], self._settings.state)
            if not found["refused"]:
                asked = {each: (url, found["path"]) for each in self._facts if each != host}
                yield storage.check_shared(self._agents.ask("see", asked, _STORAGE), host)
        finally:
            trial = (url, found["folder"], found["made"])
            cleaned = self._agents.ask("clean", {host: trial}, _STORAGE)[host]
        if isinstance(cleaned, LaunchError):
            remedy = "Delete the folder .hvdrecover-doctor-* at the root."
            yield replace(host_failure(storage.CLEANING, cleaned), remedy=remedy)
