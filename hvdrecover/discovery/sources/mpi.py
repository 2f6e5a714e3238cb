"""Hosts of an MPI job: Open MPI's default hostfile, or the hosts on which ``mpirun`` starts ranks."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping

from hvdrecover.discovery import programs
from hvdrecover.discovery.hosts import Host, add_slots, parse
from hvdrecover.discovery.sources import lists, source
from hvdrecover.errors import DiscoveryError

# Open MPI up to 4, and from 5 on. Kubeflow's MPIJob sets the first.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
# Each rank prints its host between marks: options of mpirun may add other lines, and words to each line.
_RANK = ["sh", "-c", 'echo "hvdrecover-rank-on<$(uname -n)>"']
_PRINTED = re.compile(rb"hvdrecover-rank-on<([^<>\s]*)>")


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
    names = _PRINTED.findall(programs.output([*command, *_RANK], environ, timeout))
    if not names:
        raise DiscoveryError("mpirun", "has ended with exit code 0, but its ranks have not named their hosts")
    return add_slots(((name.decode(errors="replace"), "1") for name in sorted(names)), "mpirun")
