"""Hosts of a ``tf.distribute`` cluster."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdrecover.discovery.hosts import Host, check_name, count_slots
from hvdrecover.discovery.sources import lists
from hvdrecover.errors import DiscoveryError

_TRAINING = ("chief", "master", "worker")  # parameter servers and evaluators have no part in a Horovod job


@dataclass(frozen=True)
class TfConfig:
    """The chief and the workers of a TF_CONFIG, a slot for each; from the environment, or a file."""

    every: ClassVar[float] = 1.0
    variables: ClassVar[tuple[str, ...]] = ("TF_CONFIG",)

    path: str = field(
        default="", metadata={"help": "a file with TF_CONFIG's JSON, or that of a ClusterSpec alone"}
    )

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The hosts in the file; without one, those in ``TF_CONFIG``."""
        if self.path:
            return cluster_hosts(lists.read(self.path, self.path), self.path)
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
