"""Hosts of an MPI job: the list that a batch system has made, or wherever ``mpirun`` starts ranks.

The first of these that is set is read:

================================== ==================================================================
``LSB_DJOB_HOSTFILE``              LSF: a file with a host for each slot
``LSB_MCPU_HOSTS``                 LSF: each host and its slots
``LSB_HOSTS``                      LSF: a host for each slot
``PBS_NODEFILE``                   PBS, Torque: a file with a host for each slot
``PE_HOSTFILE``                    Grid Engine: a file with a host, its slots and its queue in a line
``OMPI_MCA_orte_default_hostfile`` Open MPI up to 4: a hostfile; Kubeflow's MPIJob sets it
``PRTE_MCA_prte_default_hostfile`` Open MPI from 5 on: a hostfile
================================== ==================================================================
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hvdrecover.discovery import programs
from hvdrecover.discovery.hosts import Host, added_up, check_name, check_slots, parse
from hvdrecover.discovery.sources.mpi_ranks import MARK
from hvdrecover.errors import DiscoveryError, HostListError

_RANKS = "hvdrecover.discovery.sources.mpi_ranks"
_MARKED = re.compile(re.escape(MARK) + r"(\[[^\]]*\])")
_NUMBER = re.compile(r"[0-9]{1,9}")
_LINE_ENDS = re.compile(r"\r\n|\r|\n")

# What an mpirun around us has set, by which a second one would take itself for a rank of the first. Users'
# own settings (OMPI_MCA_btl_tcp_if_include, OMPI_ALLOW_RUN_AS_ROOT) are theirs for this one, too.
_SURROUNDINGS = re.compile(
    r"OMPI_MCA_(ess|orte|pmix|initial_wdir|mpi_oversubscribe|shmem_RUNTIME_QUERY_hint).*"
    r"|(OMPI|PMIX|PRTE)_(?!MCA_|ALLOW_RUN_AS_ROOT).*"
)
_IS_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK")


@dataclass(frozen=True)
class Mpi:
    """The hosts of LSF, PBS, Grid Engine or Open MPI's hostfile; without one, those that mpirun uses."""

    every: ClassVar[float] = 10.0  # it may start processes on every host
    variables: ClassVar[tuple[str, ...]] = (
        *("LSB_JOBID", "PBS_JOBID", "JOB_ID"),
        *("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile"),
    )

    mpirun: str = field(
        default="mpirun",
        metadata={"help": "what starts a rank for each slot, with its options", "metavar": "COMMAND"},
    )

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts of the first list that there is; without one, ``mpirun`` is asked."""
        for variable, (read, in_file) in _LISTS.items():
            value = environ.get(variable)
            if not value or value == "none":  # Open MPI's word for no hostfile
                continue
            found = read(_contents(value, variable), value) if in_file else read(value, variable)
            if not found:
                raise DiscoveryError(variable, "names no host" + (f": {value} is empty" if in_file else ""))
            return _without_launch_node(found, environ) if variable.startswith("LSB_") else found
        return added_up(ranks(programs.output(self._command(environ), outside(environ), timeout)))

    def _command(self, environ: Mapping[str, str]) -> list[str]:
        command = shlex.split(self.mpirun)
        if not command or shutil.which(command[0], path=environ.get("PATH")) is None:
            problem = "is not on PATH; load your MPI's module, or say where it is: --mpirun /path/to/mpirun"
            raise DiscoveryError(f"'{self.mpirun}'", problem)
        if importlib.util.find_spec("mpi4py") is None:
            problem = "is not installed, and the ranks of mpirun need it; pip install mpi4py"
            raise DiscoveryError("mpi4py", problem)
        return [*command, sys.executable, "-m", _RANKS]


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which ``mpirun`` can be started, also by a process that another one has started."""
    if not any(name in environ for name in _IS_RANK):
        return dict(environ)
    return {name: value for name, value in environ.items() if not _SURROUNDINGS.fullmatch(name)}


def ranks(printed: bytes) -> list[str]:
    """The host of each rank, out of all that ``mpirun`` and the ranks have printed.

    Raises:
        DiscoveryError: it is not there.
    """
    match = _MARKED.search(printed.decode(errors="replace"))
    if match is None:
        raise DiscoveryError("mpirun", "has ended well, but its ranks have not said where they are")
    names: list[str] = json.loads(match[1])
    for name in names:
        if problem := check_name(name):
            raise DiscoveryError("mpirun", problem)
    return names


def host_a_slot(text: str, source: str) -> list[Host]:
    """Hosts that are named once for each slot, in lines or in words.

    Raises:
        HostListError: a word is not a name of a host.
    """
    return added_up(_checked(*word, source) for word in _words(text))


def host_and_slots(text: str, source: str) -> list[Host]:
    """Hosts and slots by turns: ``node1 4 node2 8``.

    Raises:
        HostListError: a word is not a name of a host, or no number of slots.
    """
    words = list(_words(text))
    return _summed((words[place : place + 2] for place in range(0, len(words), 2)), source)


def host_slots_queue(text: str, source: str) -> list[Host]:
    """Grid Engine's lines, such as ``node1 4 all.q@node1 UNDEFINED``; a host has one for each queue.

    Raises:
        HostListError: a line has no name of a host, or no number of slots.
    """
    lines = itertools.groupby(_words(text), key=lambda word: word[0])
    return _summed(([*words][:2] for _, words in lines), source)


def _summed(pairs: Iterable[list[tuple[int, int, str]]], source: str) -> list[Host]:
    slots: dict[str, int] = {}
    for pair in pairs:
        name = _checked(*pair[0], source)
        number, column, count = pair[-1]
        if len(pair) < 2:
            raise HostListError(source, number, column, f"'{name}' is not followed by a number of slots")
        if not _NUMBER.fullmatch(count) or check_slots(int(count)):
            raise HostListError(source, number, column, f"'{count}' is not a number of slots")
        slots[name] = slots.get(name, 0) + int(count)
    return [Host(name, count) for name, count in slots.items()]


def _words(text: str) -> Iterator[tuple[int, int, str]]:
    """Line and column, from 1, and each word."""
    for number, line in enumerate(_LINE_ENDS.split(text), start=1):
        for match in re.finditer(r"\S+", line):
            yield number, match.start() + 1, match[0]


def _checked(number: int, column: int, name: str, source: str) -> str:
    if problem := check_name(name):
        raise HostListError(source, number, column, problem)
    return name


def _contents(path: str, variable: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig", errors="replace")
    except OSError as error:
        raise DiscoveryError(variable, f"{path} can't be read: {error.strerror}") from error


def _without_launch_node(hosts: list[Host], environ: Mapping[str, str]) -> list[Host]:
    """On IBM's CSM clusters (Summit, Sierra) LSF names first a node, of one slot, that only launches."""
    launches = "CSM_ALLOCATION_ID" in environ and len(hosts) > 1 and hosts[0].slots == 1
    return hosts[1:] if launches else hosts


# How each is read, and whether the variable names a file.
_LISTS: dict[str, tuple[Callable[[str, str], list[Host]], bool]] = {
    "LSB_DJOB_HOSTFILE": (host_a_slot, True),
    "LSB_MCPU_HOSTS": (host_and_slots, False),
    "LSB_HOSTS": (host_a_slot, False),
    "PBS_NODEFILE": (host_a_slot, True),
    "PE_HOSTFILE": (host_slots_queue, True),
    "OMPI_MCA_orte_default_hostfile": (parse, True),
    "PRTE_MCA_prte_default_hostfile": (parse, True),
}
