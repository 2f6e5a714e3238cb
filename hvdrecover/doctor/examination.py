"""All checks, one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.doctor import compute, gpus, host_memory, near, network, ring, roots, versions
from hvdrecover.doctor.agents import Agents, handed_on
from hvdrecover.doctor.facts import HostFacts
from hvdrecover.doctor.findings import Finding, checked, refused, skipped
from hvdrecover.doctor.network import Reached, Reading
from hvdrecover.doctor.ring import Launched
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.host_memory import Available
from hvdrecover.install.process import ended_by_exception
from hvdrecover.launch.horovodrun import Options

# Seconds that things may take before they count as failed.
_BEGINNING = 60.0  # logging in, and starting Python
_QUESTION = 30.0
_STORAGE = 120.0
_PRODUCTS = 250.0  # as long as hosts give their own processes
_RING = 150.0  # importing TensorFlow takes half a minute on a host that is busy
_READINGS = 5  # of each clock


@dataclass(frozen=True)
class Settings:
    """The things to examine.

    Attributes:
        hosts: host to its number of slots, in the order in which a job would use them.
        processes: how many ranks a job would have.
        interfaces: network interfaces that a job would be given.
        ssh_port: of all hosts, or None for ssh's own choice.
        identity: ssh's private key, or None.
        checkpoint: the checkpoint root, or None.
        state: size of the training state in bytes, or None.
    """

    hosts: Mapping[str, int]
    processes: int
    interfaces: tuple[str, ...] = ()
    ssh_port: int | None = None
    identity: str | None = None
    checkpoint: str | None = None
    state: int | None = None

    def ranks(self) -> dict[str, int]:
        """Host to its number of ranks; a host is filled before the next one is used.

        Raises:
            ConfigError: there are not slots enough.
        """
        left, found = self.processes, {}
        for host, slots in self.hosts.items():
            if left > 0:
                found[host] = min(slots, left)
                left -= found[host]
        if left > 0:
            slots = sum(self.hosts.values())
            problem = f"{self.processes} processes are more than the hosts' {slots} slots"
            raise ConfigError("-np", problem)
        return found


def examine(
    settings: Settings, clock: Clock, notify: Callable[[str], None], *, hosts_only: bool = False
) -> list[Finding]:
    """Make all checks.

    Args:
        settings: what to examine.
        clock: where times come from.
        notify: called with the name of what is looked at next.
        hosts_only: whether to look at nothing but the hosts, which takes seconds.

    Returns:
        What was found, in the order in which it is to be read.

    Raises:
        ConfigError: the hosts have not slots enough.
        LaunchError: no process can be started on this host.
    """
    ranks = settings.ranks()
    with (
        ended_by_exception(),
        tempfile.TemporaryDirectory(prefix="hvdrecover-doctor-") as folder,
        Agents(list(ranks), settings.ssh_port, settings.identity) as agents,
    ):
        examination = _Examination(settings, ranks, agents, Path(folder), clock, notify)
        return list(examination.of_hosts() if hosts_only else examination.findings())


class _Examination:
    """One examination, of hosts that have been logged in to."""

    def __init__(
        self,
        settings: Settings,
        ranks: Mapping[str, int],
        agents: Agents,
        folder: Path,
        clock: Clock,
        notify: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._agents = agents
        self._folder = folder
        self._clock = clock
        self._notify = notify
        self._facts: dict[str, HostFacts] = {}

    def of_hosts(self) -> Iterator[Finding]:
        self._notify("hosts")
        yield from self._hosts(self._gather_facts(), [])

    def findings(self) -> Iterator[Finding]:
        self._notify("hosts")
        problems = self._gather_facts()
        launches, sums = self._rings(any(problems.values()))
        yield from self._hosts(problems, launches)
        yield from sums
        self._notify("checkpoint root")
        yield from checked(roots.ROOT, self._root)
        yield from checked("host memory", self._memory)
        yield from checked(near.NEAR, self._near)

    def _hosts(self, problems: Mapping[str, str], launches: Iterable[Launched]) -> Iterator[Finding]:
        yield from checked("versions", self._versions)
        yield from checked("horovod", lambda: self._horovod(launches))
        yield from checked("ssh", lambda: network.judge_ssh(problems, self._local()))
        self._notify("network")
        for check, look in (
            ("names", self._names),
            ("network", self._network),
            ("clocks", self._clocks),
        ):
            yield from checked(check, look if self._several() else lambda check=check: self._alone(check))  # type: ignore[misc]
        self._notify("processors")
        yield from checked(compute.COMPUTE, self._compute)
        yield from checked(gpus.GPUS, self._gpus)

    # -- hosts -----------------------------------------------------------------------------------------

    def _gather_facts(self) -> dict[str, str]:
        """Get the facts of all hosts that answer; what is wrong with each one, or an empty string."""
        remote = [host for host in self._ranks if host not in self._local()]
        variables = handed_on()
        self._agents.ask(dict.fromkeys(remote, (variables,)), "adopt", _BEGINNING)
        answers = self._agents.ask(dict.fromkeys(self._ranks, ()), "facts", _BEGINNING)
        problems = {}
        for host, answer in answers.items():
            problems[host] = answer.problem if isinstance(answer, LaunchError) else ""
            if not isinstance(answer, LaunchError):
                self._facts[host] = HostFacts.of(answer)
        return problems

    def _local(self) -> list[str]:
        return [host for host in self._ranks if self._agents[host].here]

    def _several(self) -> bool:
        """Return whether there are hosts that have to find each other."""
        return len(self._facts) > 1 and any(host not in self._local() for host in self._facts)

    def _alone(self, check: str) -> Finding:
        lost = len(self._facts) < len(self._ranks)
        return skipped(check, "it takes two hosts that answer" if lost else "this host only")

    def _versions(self) -> Finding:
        return versions.judge(self._facts) if self._facts else _unreached("versions")

    def _horovod(self, launches: Iterable[Launched]) -> Finding:
        built = {each.by: each.built for each in launches if each.built}
        return versions.judge_horovod(self._facts, built) if self._facts else _unreached("horovod")

    def _names(self) -> Finding:
        return network.judge_names(self._resolved())

    def _resolved(self) -> dict[str, dict[str, str | None]]:
        names = list(self._facts)
        return _answers(self._agents.ask(dict.fromkeys(names, (names,)), "resolve", _QUESTION))

    def _network(self) -> Finding:
        own = self._interfaces()
        asked = {
            host: ({peer: (own[peer][1], facts.port) for peer, facts in self._facts.items() if peer != host},)
            for host in self._facts
        }
        problems = _answers(self._agents.ask(asked, "reach", _QUESTION))
        return network.judge_network({host: Reached(*own[host], problems[host]) for host in self._facts})

    def _interfaces(self) -> dict[str, tuple[str, str]]:
        """Host to the interface by which it reaches others, and its address there."""
        wanted = self._settings.interfaces
        if wanted:
            return {host: _first_of(wanted, facts.interfaces) for host, facts in self._facts.items()}
        addresses = network.addresses_of(self._resolved())
        found: dict[str, tuple[str, str]] = {}
        for _ in range(2):  # a host that the others know no name of is known by its own address then
            known = {host: [addresses[peer] for peer in addresses if peer != host] for host in self._facts}
            targets = {host: (others[0],) for host, others in known.items() if others}
            routes = _answers(self._agents.ask(targets, "route", _QUESTION))
            for host, (interface, address) in routes.items():
                found[host] = interface, address
                if address:
                    addresses.setdefault(host, address)
        return {host: found.get(host, ("", "")) for host in self._facts}

    def _clocks(self) -> Finding:
        offsets = {}
        for host in self._facts:
            readings = []
            for _ in range(_READINGS):
                asked = self._clock.now()
                told = self._agents[host].ask("clock", timeout=_QUESTION)
                readings.append(Reading(asked, told, self._clock.now()))
            offsets[host] = network.offset(readings)
        return network.judge_clocks(offsets)

    def _compute(self) -> Iterator[Finding]:
        """Hosts that are one machine, as containers are, one after the other: they would slow each other."""
        machines: dict[str, list[str]] = {}
        for host, facts in self._facts.items():
            machines.setdefault(facts.machine or host, []).append(host)
        found: dict[str, Any] = {}
        for hosts in zip_longest(*machines.values()):
            found |= self._agents.ask({host: () for host in hosts if host}, "compute", _PRODUCTS)
        yield from self._judged(compute.COMPUTE, found, compute.judge)

    def _gpus(self) -> Iterator[Finding]:
        found = self._agents.ask(dict.fromkeys(self._facts, ()), "gpus", _QUESTION)
        yield from self._judged(gpus.GPUS, found, gpus.judge)

    def _judged(
        self,
        check: str,
        answers: Mapping[str, Any | LaunchError],
        judge: Callable[[dict[str, Any]], list[Finding]],
    ) -> Iterator[Finding]:
        """Return what is judged of the hosts that have answered, and the others' errors."""
        good = {host: each for host, each in answers.items() if not isinstance(each, LaunchError)}
        yield from judge(good) if good else [] if answers else [_unreached(check)]
        for each in answers.values():
            if isinstance(each, LaunchError):
                yield refused(check, each, "Look after this host, and run `hvdrecover doctor` again.")

    def _memory(self) -> Finding:
        if not self._facts:
            return _unreached("host memory")
        free = {host: Available(facts.memory, facts.limited) for host, facts in self._facts.items()}
        return host_memory.judge(free, self._ranks, self._settings.state)

    def _near(self) -> Finding:
        if not self._facts:
            return _unreached(near.NEAR)
        asked = dict.fromkeys(self._facts, (self._settings.checkpoint,))
        found = _answers(self._agents.ask(asked, "near", _QUESTION))
        return near.judge(found, self._settings.state, self._clock.now())

    # -- allreduce -------------------------------------------------------------------------------------

    def _rings(self, lost: bool) -> tuple[list[Launched], list[Finding]]:
        """Sum over all ranks in each way that is installed; what came of it, and what that means."""
        first = next(iter(self._facts.values()), None)
        ways = [by for by in ("torch", "tensorflow") if first is not None and first.versions[by]]
        if lost or first is None:
            return [], [skipped("allreduce", "not all hosts can be logged in to")]
        if first.horovod is None:
            return [], [skipped("allreduce", "Horovod is not installed")]
        launches: list[Launched] = []
        if first.versions[ring.MPI] is None:
            mpi = [skipped(ring.check_of(ring.MPI), "mpi4py is not installed")]
        else:
            mpi = checked(ring.check_of(ring.MPI), lambda: ring.judge_mpi(self._launch(ring.MPI, launches)))
        peer = next((each for each in launches if mpi[0].outcome == "ok"), None)
        found: list[Finding] = []
        for by in ways:
            found += checked(ring.check_of(by), lambda by=by: ring.judge(self._launch(by, launches), peer))  # type: ignore[misc]
        return launches, found + mpi

    def _launch(self, by: str, launches: list[Launched]) -> Launched:
        self._notify(ring.check_of(by))
        options = Options(
            self._settings.processes,
            hosts=",".join(f"{host}:{slots}" for host, slots in self._settings.hosts.items()),
            interfaces=self._settings.interfaces,
            ssh_port=self._settings.ssh_port,
            identity=self._settings.identity,
        )
        launches.append(ring.launch(by, options, self._folder, _RING))
        return launches[-1]

    # -- the checkpoint root ---------------------------------------------------------------------------

    def _root(self) -> Iterator[Finding]:
        """From the host that rank 0 would be on, as that writes commits."""
        url, host = self._settings.checkpoint, next(iter(self._ranks))
        if url is None:
            yield skipped(roots.ROOT, "none is named; --checkpoint or HVDRECOVER_CHECKPOINT does")
            return
        if host not in self._facts:
            yield skipped(roots.ROOT, f"{host}, which would write to it, can't be logged in to")
            return
        writer = self._agents[host]
        try:
            found = writer.ask("root", url, timeout=_STORAGE)
        except LaunchError as error:
            yield refused(roots.ROOT, error, "Check the URL, and install what it needs.")
            return
        yield roots.judge_root(found, self._clock.now())
        yield from checked(roots.WRITING, lambda: self._tried(url, host, found))
        yield roots.judge_space(found["free"], self._settings.state)
        yield from checked(roots.CLEANING, lambda: self._cleaned(host))

    def _tried(self, url: str, host: str, found: Mapping[str, Any]) -> Iterator[Finding]:
        writer = self._agents[host]
        try:
            yield roots.judge_writing(writer.ask("write", timeout=_STORAGE), host)
        except LaunchError as error:
            yield refused(roots.WRITING, error, "Check the root, the permissions and the storage.")
            return
        try:
            yield roots.judge_creating(writer.ask("create", timeout=_STORAGE))
        except LaunchError as error:
            yield refused(roots.CREATING, error, "Check the root, the permissions and the storage.")
        others = {each: (url, found["path"]) for each in self._facts if each != host}
        seen = self._agents.ask(others, "see", _STORAGE)
        told = {each: it.problem if isinstance(it, LaunchError) else bool(it) for each, it in seen.items()}
        yield roots.judge_shared(told, host)

    def _cleaned(self, host: str) -> Iterator[Finding]:
        try:
            self._agents[host].ask("clean", timeout=_STORAGE)
        except LaunchError as error:
            remedy = "Delete what begins with .hvdrecover-doctor- in the root by hand."
            yield refused(roots.CLEANING, error, remedy)


def _answers(answers: Mapping[str, Any | LaunchError]) -> dict[str, Any]:
    """The answers of all hosts.

    Raises:
        LaunchError: a host has not answered.
    """
    for answer in answers.values():
        if isinstance(answer, LaunchError):
            raise answer
    return dict(answers)


def _first_of(wanted: Iterable[str], interfaces: Mapping[str, str]) -> tuple[str, str]:
    """The first interface of those wanted that there is, and its address; empty if there is none."""
    return next(((name, interfaces[name]) for name in wanted if name in interfaces), ("", ""))


def _unreached(check: str) -> Finding:
    return skipped(check, "no host answers")
