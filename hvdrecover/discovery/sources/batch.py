"""Hosts of a job of LSF, PBS, Grid Engine or Cobalt, which list them in a variable or in a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hvdrecover.discovery.hosts import LINE_ENDS, Host, check_count, check_name, count_slots
from hvdrecover.discovery.sources import lists
from hvdrecover.errors import DiscoveryError, HostListError

_Word = tuple[int, int, str]  # line and column, from 1, and the word itself


@dataclass(frozen=True)
class Lsf:
    """The hosts of an LSF job (bsub), with their slots."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("LSB_JOBID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``LSB_DJOB_HOSTFILE``, ``LSB_MCPU_HOSTS`` or ``LSB_HOSTS``."""
        if environ.get("LSB_DJOB_HOSTFILE"):
            hosts = host_per_slot(contents("LSB_DJOB_HOSTFILE", environ), "LSB_DJOB_HOSTFILE")
        elif environ.get("LSB_MCPU_HOSTS"):
            words = list(_words(environ["LSB_MCPU_HOSTS"]))
            pairs = [words[place : place + 2] for place in range(0, len(words), 2)]
            hosts = host_and_slots(pairs, "LSB_MCPU_HOSTS")
        else:
            hosts = host_per_slot(_required("LSB_HOSTS", environ, "bsub"), "LSB_HOSTS")
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
        return host_per_slot(contents("PBS_NODEFILE", environ), "PBS_NODEFILE")


@dataclass(frozen=True)
class GridEngine:
    """The hosts of a Grid Engine job (qsub -pe), with the slots of all their queues."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("JOB_ID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``PE_HOSTFILE``; a line is like ``node1 4 all.q@node1 UNDEFINED``."""
        lines: dict[int, list[_Word]] = {}
        for word in _words(contents("PE_HOSTFILE", environ)):
            lines.setdefault(word[0], []).append(word)
        return host_and_slots([line[:2] for line in lines.values()], "PE_HOSTFILE")


@dataclass(frozen=True)
class Cobalt:
    """The hosts of a Cobalt job; its file tells no slots, so give --slots."""

    every: ClassVar[float] = 10.0
    variables: ClassVar[tuple[str, ...]] = ("COBALT_JOBID",)

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in ``COBALT_NODEFILE``."""
        hosts = host_per_slot(contents("COBALT_NODEFILE", environ), "COBALT_NODEFILE")
        return [Host(host.name) for host in hosts]


def contents(variable: str, environ: Mapping[str, str]) -> str:
    """Return the content of the file that a variable names.

    Raises:
        DiscoveryError: the variable is not set, or its file cannot be read or is empty.
    """
    path = _required(variable, environ, "its batch system")
    text = lists.read(path, variable).decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise DiscoveryError(variable, f"names no host: {path} is empty")
    return text


def _required(variable: str, environ: Mapping[str, str], starter: str) -> str:
    if value := environ.get(variable, "").strip():
        return value
    raise DiscoveryError(variable, f"is not set; start the job by {starter}")


def host_per_slot(text: str, source: str) -> list[Host]:
    """Return the hosts of a text that names each host once per slot.

    Raises:
        HostListError: a word is not a valid host name.
    """
    return count_slots(_checked(word, source) for word in _words(text))


def host_and_slots(pairs: list[list[_Word]], source: str) -> list[Host]:
    """Return the hosts of pairs of a host and a number of slots; the slots of a repeated host are added.

    Raises:
        HostListError: a word is not a valid host name or number of slots.
    """
    slots: dict[str, int] = {}
    for pair in pairs:
        name = _checked(pair[0], source)
        line, column, count = pair[-1]
        problem = check_count(count) if len(pair) == 2 else f"'{name}' is not followed by a number of slots"
        if problem:
            raise HostListError(source, line, column, problem)
        slots[name] = slots.get(name, 0) + int(count)
    return [Host(name, count) for name, count in slots.items()]


def _words(text: str) -> Iterator[_Word]:
    for number, line in enumerate(LINE_ENDS.split(text), start=1):
        for match in re.finditer(r"\S+", line):
            yield number, match.start() + 1, match[0]


def _checked(word: _Word, source: str) -> str:
    line, column, name = word
    if problem := check_name(name):
        raise HostListError(source, line, column, problem)
    return name
