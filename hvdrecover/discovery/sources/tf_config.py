"""Hosts of a ``tf.distribute`` cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdrecover.discovery.hosts import Host, check_name, count_slots
from hvdrecover.discovery.sources import lists
from hvdrecover.errors import DiscoveryError, HostListError

_TRAINING = ("chief", "master", "worker")  # parameter servers and evaluators have no part in a Horovod job
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LAST_PORT = 65535


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
    """Return the hosts that train.

    Args:
        data: the JSON of a TF_CONFIG, or of its cluster alone.
        source: the name of the JSON in errors.

    Raises:
        HostListError: it is not JSON.
        DiscoveryError: it has no cluster with a training task, or an address is not valid.
    """
    try:
        config = json.loads(data if isinstance(data, str) else data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise HostListError(source, error.lineno, error.colno, f"is not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        problem = f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
        raise DiscoveryError(source, problem) from None
    cluster = None
    if isinstance(config, dict):
        alone = any(job in config for job in _TRAINING)  # the JSON may be the cluster itself
        cluster = config.get("cluster", config if alone else None)
    if not isinstance(cluster, dict):
        problem = 'has no cluster; it must be like {"cluster": {"worker": ["node1:2222", "node2:2222"]}}'
        raise DiscoveryError(source, problem)
    hosts = count_slots(
        _host(address, f"{source}: {job}[{index}]")
        for job in _TRAINING
        for index, address in _tasks(cluster.get(job, []), f"{source}: {job}")
    )
    if not hosts:
        raise DiscoveryError(source, f"its cluster names no {', no '.join(_TRAINING)}")
    return hosts


def _tasks(job: Any, place: str) -> Iterator[tuple[Any, Any]]:
    """Return the number and the address of each task of a job."""
    if isinstance(job, list):
        yield from enumerate(job)
    elif isinstance(job, dict):  # sparse: only some of the tasks
        yield from job.items()
    else:
        raise DiscoveryError(place, 'must be a list of addresses, or some by number like {"0": "node1:2222"}')


def _host(address: Any, place: str) -> str:
    if not isinstance(address, str):
        raise DiscoveryError(place, f"{json.dumps(address)} is not an address; write host:port")
    host, colon, port = address.rpartition(":")
    if not colon:
        raise DiscoveryError(place, f"'{address}' has no port; write host:port")
    name = address if ":" in host and not host.startswith("[") else host
    if problem := check_name(name):
        raise DiscoveryError(place, problem)
    if not _PORT.fullmatch(port) or int(port) > _LAST_PORT:
        raise DiscoveryError(place, f"'{port}' is not a port; write host:port")
    return host
