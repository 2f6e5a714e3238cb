"""Hosts of a list: on the command line, in a file, printed by a program, or in a variable.

A list that people write, or that a program prints, names one host a line, in any of these forms::

    node1:4              Horovod's form
    node2 slots=4        Open MPI's form; max_slots=8 may follow and is ignored
    node3                no number of slots
    # a comment; also after a host

LSF, PBS, Grid Engine and Open MPI list the hosts of a job in a variable, or in a file that a variable names.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from pathlib import Path

from hvdrecover.discovery.sources import Host, check, output_of, source
from hvdrecover.errors import DiscoveryError, HostListError

# Open MPI up to 4, and from 5 on. Kubeflow's MPIJob sets the first.
_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile")
# Each rank prints its host between marks: options of mpirun may add other lines, and words to each line.
_RANK = ["sh", "-c", 'echo "hvdrecover-rank-on<$(uname -n)>"']
_PRINTED = re.compile(rb"hvdrecover-rank-on<([^<>\s]*)>")
_TRAINING = ("chief", "master", "worker")  # parameter servers and evaluators have no part in a Horovod job


def parse(data: bytes | str, source: str) -> list[Host]:
    """Return the hosts of a list, which may be empty; `source` is its name in errors."""
    hosts: dict[str, Host] = {}
    encoded = data.encode(errors="replace") if isinstance(data, str) else data
    for number, line in enumerate(encoded.splitlines(), start=1):
        try:
            host = _parse_line(line.decode("utf-8-sig").partition("#")[0])
        except UnicodeDecodeError as error:
            raise HostListError(source, number, f"byte 0x{line[error.start]:02x} is not UTF-8") from None
        except ValueError as error:
            raise HostListError(source, number, str(error)) from None
        if host is None:
            continue
        if host.name in hosts:
            raise HostListError(
                source, number, f"'{host.name}' is named twice; name it once, with all its slots"
            )
        hosts[host.name] = host
    return list(hosts.values())


def _parse_line(text: str) -> Host | None:
    """Return the host of a line without its comment; None if the line is empty."""
    name, *options = re.sub(r"\s*=\s*", "=", text).split() or [""]
    if not name:
        return None
    counts = []
    if name.count(":") == 1 and not name.startswith("["):
        name, _, count = name.partition(":")
        counts.append(count)
    for option in options:
        key, equals, value = option.partition("=")
        if key == "slots" and equals:
            counts.append(value)
        elif key not in ("max_slots", "max-slots"):
            raise ValueError(f"unknown word '{option}'; write slots=N after the host")
    if len(counts) > 1:
        raise ValueError(f"'{name}' has two numbers of slots")
    if problem := check(name, *counts):
        raise ValueError(problem)
    return Host(name, int(counts[0]) if counts else None)


def add_slots(pairs: Iterable[tuple[str, str]], source: str) -> list[Host]:
    """Return the hosts of pairs of a name and a number of slots; the slots of a repeated host are added."""
    slots: dict[str, int] = {}
    for name, count in pairs:
        if problem := check(name, count):
            raise DiscoveryError(source, problem)
        slots[name] = slots.get(name, 0) + int(count)
    return [Host(name, count) for name, count in slots.items()]


@source(every=1.0, variables=(), hosts="host:slots,host:slots")
def static(environ: Mapping[str, str], timeout: float, hosts: str) -> list[Host]:
    """Hosts that don't change; those that fail their checks are left out."""
    try:
        return parse(hosts.replace(",", "\n"), hosts)
    except HostListError as error:
        raise DiscoveryError(hosts, error.problem) from None


@source(every=1.0, variables=(), path="the file")
def file(environ: Mapping[str, str], timeout: float, path: str) -> list[Host]:
    """A hostfile: a line host:4, or host slots=4, for each host; it is read again when it changes."""
    return parse(read(path, path), path)


@source(every=1.0, command="the program and its arguments")
def command(environ: Mapping[str, str], timeout: float, command: tuple[str, ...]) -> list[Host]:
    """A program that prints a line host:slots for each host, as for horovodrun."""
    if not command:
        raise DiscoveryError("command", "names no program; write command and the program with its arguments")
    return parse(output_of(command, environ, timeout), command[0])


def read(path: str, source: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        where = "" if source == path else f"{path} "
        raise DiscoveryError(source, f"{where}cannot be read: {error.strerror}") from error


@source(
    every=1.0, variables=("TF_CONFIG",), path="a file with TF_CONFIG's JSON, or that of a ClusterSpec alone"
)
def tf_config(environ: Mapping[str, str], timeout: float, path: str = "") -> list[Host]:
    """The chief and the workers of a TF_CONFIG, a slot for each; from the environment, or a file."""
    name = path or "TF_CONFIG"
    if not path and name not in environ:
        raise DiscoveryError(name, "is not set; set it, or name a file: --path FILE")
    try:
        text = read(path, path).decode("utf-8-sig") if path else environ[name]
        config = json.loads(text)
    except ValueError as error:
        raise DiscoveryError(name, f"is not JSON: {error}") from None
    try:
        cluster = config.get("cluster", config)  # the JSON may be the cluster itself
        jobs = [cluster[job] for job in _TRAINING if cluster.get(job)]
        # In a sparse cluster, a job is a mapping from the numbers of its tasks.
        addresses = [each for job in jobs for each in (job.values() if isinstance(job, dict) else job)]
        hosts = [address.rpartition(":")[0] or address for address in addresses]  # Horovod ignores the port
    except (AttributeError, TypeError):
        hosts = []
    if not hosts:
        problem = 'must name a chief or workers like {"cluster": {"worker": ["node1:2222", "node2:2222"]}}'
        raise DiscoveryError(name, problem)
    return add_slots(((host, "1") for host in hosts), name)


# -- batch systems and MPI -------------------------------------------------------------------------------


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
        if environ.get(variable) not in (None, "", "none"):  # Open MPI's word for no hostfile
            return parse(_file(variable, environ), environ[variable])
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
    path = _required(variable, environ)
    text = read(path, variable).decode("utf-8-sig", errors="replace")
    if not text.strip():
        raise DiscoveryError(variable, f"names no host: {path} is empty")
    return text


def _required(variable: str, environ: Mapping[str, str]) -> str:
    if value := environ.get(variable, "").strip():
        return value
    raise DiscoveryError(variable, "is not set; start the job by its batch system")
