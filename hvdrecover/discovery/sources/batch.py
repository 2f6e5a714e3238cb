"""Hosts of a job of LSF, PBS, Grid Engine or Cobalt, which list them in a variable or in a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvdrecover.discovery.hosts import Host, check_count, check_name
from hvdrecover.discovery.sources import lists
from hvdrecover.errors import DiscoveryError


@dataclass(frozen=True)
class Lsf:
    """The hosts of an LSF job (bsub), with their slots."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("LSB_JOBID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``LSB_DJOB_HOSTFILE``, ``LSB_MCPU_HOSTS`` or ``LSB_HOSTS``."""
        if environ.get("LSB_DJOB_HOSTFILE"):
            hosts = _once_per_slot("LSB_DJOB_HOSTFILE", _file("LSB_DJOB_HOSTFILE", environ))
        elif words := environ.get("LSB_MCPU_HOSTS", "").split():
            pairs = (words[place : place + 2] for place in range(0, len(words), 2))
            hosts = _with_slots("LSB_MCPU_HOSTS", pairs)
        else:
            hosts = _once_per_slot("LSB_HOSTS", _required("LSB_HOSTS", environ, "bsub"))
        # IBM's CSM clusters (Summit, Sierra) name first a launch node with one slot; it cannot train.
        launch_node = "CSM_ALLOCATION_ID" in environ and len(hosts) > 1 and hosts[0].slots == 1
        return hosts[1:] if launch_node else hosts


@dataclass(frozen=True)
class Pbs:
    """The hosts of a PBS or Torque job (qsub), with a slot for each of their lines in PBS_NODEFILE."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("PBS_JOBID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``PBS_NODEFILE``."""
        return _once_per_slot("PBS_NODEFILE", _file("PBS_NODEFILE", environ))


@dataclass(frozen=True)
class GridEngine:
    """The hosts of a Grid Engine job (qsub -pe), with the slots of all their queues."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("JOB_ID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``PE_HOSTFILE``; a line is like ``node1 4 all.q@node1 UNDEFINED``."""
        lines = map(str.split, _file("PE_HOSTFILE", environ).splitlines())
        return _with_slots("PE_HOSTFILE", (line[:2] for line in lines if line))


@dataclass(frozen=True)
class Cobalt:
    """The hosts of a Cobalt job; its file tells no slots, so give --slots."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("COBALT_JOBID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``COBALT_NODEFILE``."""
        hosts = _once_per_slot("COBALT_NODEFILE", _file("COBALT_NODEFILE", environ))
        return [Host(host.name) for host in hosts]


def _file(variable: str, environ: Mapping[str, str]) -> str:
    """Return the content of the file that a variable names."""
    path = _required(variable, environ, "its batch system")
    text = lists.read(path, variable).decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise DiscoveryError(variable, f"names no host: {path} is empty")
    return text


def _required(variable: str, environ: Mapping[str, str], starter: str) -> str:
    if value := environ.get(variable, "").strip():
        return value
    raise DiscoveryError(variable, f"is not set; start the job by {starter}")


def _once_per_slot(variable: str, text: str) -> list[Host]:
    """Return the hosts of a text that names each host once per slot."""
    return _with_slots(variable, ([name, "1"] for name in text.split()))


def _with_slots(variable: str, pairs: Iterable[list[str]]) -> list[Host]:
    """Return the hosts of pairs of a host and a number of slots; the slots of a repeated host are added."""
    slots: dict[str, int] = {}
    for name, *count in pairs:
        problem = check_name(name) or ("" if count else f"'{name}' is not followed by a number of slots")
        if problem := problem or check_count(count[0]):
            raise DiscoveryError(variable, problem)
        slots[name] = slots.get(name, 0) + int(count[0])
    return [Host(name, count) for name, count in slots.items()]
