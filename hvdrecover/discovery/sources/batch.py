"""Hosts of a job of LSF, PBS, Grid Engine or Open MPI, which list them in a variable or in a file."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from itertools import zip_longest

from hvdrecover.discovery.hosts import Host, add_slots, output_of, parse
from hvdrecover.discovery.sources import lists, source
from hvdrecover.errors import DiscoveryError

# Open MPI up to 4, and from 5 on. Kubeflow's MPIJob sets the first.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
# Each rank prints its host between marks: options of mpirun may add other lines, and words to each line.
_RANK = ["sh", "-c", 'echo "hvdrecover-rank-on<$(uname -n)>"']
_PRINTED = re.compile(rb"hvdrecover-rank-on<([^<>\s]*)>")


@source(every=10.0, variables=("LSB_JOBID",))
def lsf(environ: Mapping[str, str], timeout: float) -> list[Host]:
    """The hosts of an LSF job (bsub), with their slots."""
    if environ.get("LSB_DJOB_HOSTFILE"):
        return _in_file("LSB_DJOB_HOSTFILE", environ)
    if words := environ.get("LSB_MCPU_HOSTS", "").split():
        return add_slots(zip_longest(words[::2], words[1::2], fillvalue=""), "LSB_MCPU_HOSTS")
    return add_slots(((name, "1") for name in _required("LSB_HOSTS", environ).split()), "LSB_HOSTS")


@source(every=10.0, variables=("PBS_JOBID",))
def pbs(environ: Mapping[str, str], timeout: float) -> list[Host]:
    """The hosts of a PBS or Torque job (qsub), with a slot for each of their lines in PBS_NODEFILE."""
    return _in_file("PBS_NODEFILE", environ)


@source(every=10.0, variables=("JOB_ID",))
def sge(environ: Mapping[str, str], timeout: float) -> list[Host]:
    """The hosts of a Grid Engine job (qsub -pe), with the slots of all their queues."""
    lines = map(str.split, _file("PE_HOSTFILE", environ).splitlines())  # node1 4 all.q@node1 UNDEFINED
    return add_slots(((line[0], line[1] if line[1:] else "") for line in lines if line), "PE_HOSTFILE")


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
    names = _PRINTED.findall(output_of([*command, *_RANK], environ, timeout))
    if not names:
        raise DiscoveryError("mpirun", "has ended with exit code 0, but its ranks have not named their hosts")
    return add_slots(((name.decode(errors="replace"), "1") for name in sorted(names)), "mpirun")


def _in_file(variable: str, environ: Mapping[str, str]) -> list[Host]:
    """Return the hosts of a file that names each host once per slot."""
    return add_slots(((name, "1") for name in _file(variable, environ).split()), variable)


def _file(variable: str, environ: Mapping[str, str]) -> str:
    """Return the content of the file that a variable names."""
    path = _required(variable, environ)
    text = lists.read(path, variable).decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise DiscoveryError(variable, f"names no host: {path} is empty")
    return text


def _required(variable: str, environ: Mapping[str, str]) -> str:
    if value := environ.get(variable, "").strip():
        return value
    raise DiscoveryError(variable, "is not set; start the job by its batch system")
