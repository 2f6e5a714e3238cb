"""Hosts of a list: on the command line, in a file, printed by a program, or in a ``TF_CONFIG``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdrecover.discovery import programs
from hvdrecover.discovery.hosts import Host, check_name, count_slots, parse
from hvdrecover.discovery.sources import source
from hvdrecover.errors import DiscoveryError, HostListError

_TRAINING = ("chief", "master", "worker")  # parameter servers and evaluators have no part in a Horovod job


@source(every=1.0, variables=(), hosts="host:slots,host:slots")
def static(environ: Mapping[str, str], timeout: float, hosts: str) -> list[Host]:
    """Hosts that don't change; those that fail their checks are left out."""
    try:
        return parse(hosts.replace(",", "\n"), hosts)
    except HostListError as error:
        before = hosts.split(",")[: error.line - 1]
        column = sum(len(each) + 1 for each in before) + error.column
        raise HostListError(hosts, 1, column, error.problem) from None


@source(every=1.0, variables=(), path="the file")
def file(environ: Mapping[str, str], timeout: float, path: str) -> list[Host]:
    """A hostfile: a line host:4, or host slots=4, for each host; it is read again when it changes."""
    return parse(read(path, path), path)


@source(every=1.0, command="the program and its arguments")
def command(environ: Mapping[str, str], timeout: float, command: tuple[str, ...]) -> list[Host]:
    """A program that prints a line host:slots for each host, as for horovodrun."""
    return parse(programs.output(command, environ, timeout), command[0])


def read(path: str, source: str) -> bytes:
    """Return the content of a file.

    Raises:
        DiscoveryError: it cannot be read.
    """
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
    if path:
        return cluster_hosts(read(path, path), path)
    if "TF_CONFIG" not in environ:
        raise DiscoveryError("TF_CONFIG", "is not set; set it, or name a file: --path FILE")
    return cluster_hosts(environ["TF_CONFIG"], "TF_CONFIG")


def cluster_hosts(data: bytes | str, source: str) -> list[Host]:
    """Return the hosts that train, from the JSON of a TF_CONFIG, or of its cluster alone.

    Raises `DiscoveryError`, with `source` as its name, if there is none in it, or an address is invalid.
    """
    try:
        config = json.loads(data if isinstance(data, str) else data.decode("utf-8-sig"))
    except ValueError as error:
        raise DiscoveryError(source, f"is not JSON: {error}") from None
    cluster = None
    if isinstance(config, dict):
        alone = any(job in config for job in _TRAINING)  # the JSON may be the cluster itself
        cluster = config.get("cluster", config if alone else None)
    if not isinstance(cluster, dict):
        problem = 'has no cluster; it must be like {"cluster": {"worker": ["node1:2222", "node2:2222"]}}'
        raise DiscoveryError(source, problem)
    hosts = count_slots(
        _host(address, f"{source}: {job}")
        for job in _TRAINING
        for address in _addresses(cluster.get(job, []), f"{source}: {job}")
    )
    if not hosts:
        raise DiscoveryError(source, f"its cluster names no {', no '.join(_TRAINING)}")
    return hosts


def _addresses(tasks: Any, place: str) -> list[Any]:
    if isinstance(tasks, dict):  # only some of the tasks, by their numbers
        return list(tasks.values())
    if not isinstance(tasks, list):
        problem = 'must be a list of addresses, or some by number like {"0": "node1:2222"}'
        raise DiscoveryError(place, problem)
    return tasks


def _host(address: Any, place: str) -> str:
    """Return the host of an address such as ``node1:2222``; Horovod does not use the port."""
    if not isinstance(address, str):
        raise DiscoveryError(place, f"{json.dumps(address)} is not an address; write host:port")
    host = address.rpartition(":")[0] or address
    if problem := check_name(host):
        raise DiscoveryError(place, problem)
    return host
