"""Hosts of an MPI job: Open MPI's default hostfile, or the hosts on which ``mpirun`` starts ranks.

Run as a program under ``mpirun``, this module prints the host of each rank.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import shutil
import sys
from collections.abc import Mapping

from hvdrecover.discovery import programs
from hvdrecover.discovery.hosts import Host, check_name, count_slots, parse
from hvdrecover.discovery.sources import lists, source
from hvdrecover.errors import DiscoveryError

MARK = "hvdrecover: ranks are on "
_MARKED = re.compile(re.escape(MARK) + r"(\[[^\]]*\])")
# Open MPI up to 4, and from 5 on. Kubeflow's MPIJob sets the first.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
# Variables by which an mpirun inside of another one would take itself for a rank of the outer one. Users' own
# settings (OMPI_MCA_btl_tcp_if_include, OMPI_ALLOW_RUN_AS_ROOT) stay.
_OF_A_RANK = re.compile(
    r"OMPI_MCA_(ess|orte|pmix|initial_wdir|mpi_oversubscribe|shmem_RUNTIME_QUERY_hint).*"
    r"|(OMPI|PMIX|PRTE)_(?!MCA_|ALLOW_RUN_AS_ROOT).*"
)


# `every`: it may start processes on every host.
@source(every=10.0, variables=_HOSTFILES, mpirun="command that starts a rank for each slot, with its options")
def mpi(environ: Mapping[str, str], timeout: float, mpirun: str = "mpirun") -> list[Host]:
    """The hosts of Open MPI's default hostfile; without one, those that mpirun uses."""
    for variable in _HOSTFILES:
        path = environ.get(variable)
        if path and path != "none":  # Open MPI's word for no hostfile
            if hosts := parse(lists.read(path, variable), path):
                return hosts
            raise DiscoveryError(variable, f"names no host: {path} is empty")
    command = shlex.split(mpirun)
    if not command or shutil.which(command[0], path=environ.get("PATH")) is None:
        problem = "is not on PATH; load your MPI's module, or give its path: --mpirun /path/to/mpirun"
        raise DiscoveryError(f"'{mpirun}'", problem)
    if importlib.util.find_spec("mpi4py") is None:
        problem = "is not installed, and the ranks of mpirun need it; pip install mpi4py"
        raise DiscoveryError("mpi4py", problem)
    command += [sys.executable, "-m", "hvdrecover.discovery.sources.mpi"]
    return count_slots(ranks(programs.output(command, outside(environ), timeout)))


def outside(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which ``mpirun`` starts, also from a rank of another ``mpirun``."""
    if "OMPI_COMM_WORLD_RANK" not in environ and "PMIX_RANK" not in environ:
        return dict(environ)
    return {name: value for name, value in environ.items() if not _OF_A_RANK.fullmatch(name)}


def ranks(printed: bytes) -> list[str]:
    """Return the host of each rank from the output of ``mpirun``, which may contain other lines.

    Raises:
        DiscoveryError: the output has no such line.
    """
    if (match := _MARKED.search(printed.decode(errors="replace"))) is None:
        raise DiscoveryError("mpirun", "has ended with exit code 0, but its ranks have not named their hosts")
    names: list[str] = json.loads(match[1])
    if problem := next(filter(None, map(check_name, names)), ""):
        raise DiscoveryError("mpirun", problem)
    return names


def main() -> None:
    """Gather the host names of all ranks; rank 0 prints them."""
    from mpi4py import MPI  # initialises MPI

    hosts = MPI.COMM_WORLD.gather(MPI.Get_processor_name())
    if hosts is not None:  # rank 0
        # On a new line, whatever was printed before.
        sys.stdout.write(f"\n{MARK}{json.dumps(hosts)}\n")


if __name__ == "__main__":
    main()
