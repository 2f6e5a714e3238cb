"""Hosts of a list: on the command line, in a file, printed by a program, or in a ``TF_CONFIG``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from hvdrecover.discovery.hosts import Host, add_slots, output_of, parse
from hvdrecover.discovery.sources import source
from hvdrecover.errors import DiscoveryError, HostListError

_TRAINING = ("chief", "master", "worker")  # parameter servers and evaluators have no part in a Horovod job


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
    return parse(output_of(command, environ, timeout), command[0])


def read(path: str, source: str) -> bytes:
    """Return the content of a file; raise `DiscoveryError` if it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        where = "" if source == path else f"{path} "
        raise DiscoveryError(source, f"{where}cannot be read: {error.strerror}") from error


@source(
    every=1.0,
    variables=("TF_CONFIG",),
    path="a file with TF_CONFIG's JSON, or that of a ClusterSpec alone",
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
