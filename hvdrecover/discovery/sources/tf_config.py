"""Hosts of a ``tf.distribute`` cluster."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hvdrecover.discovery.hosts import Host, added_up, check_name
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
            try:
                return cluster_hosts(Path(self.path).read_bytes(), self.path)
            except OSError as error:
                raise DiscoveryError(self.path, f"can't be read: {error.strerror}") from error
        if "TF_CONFIG" not in environ:
            raise DiscoveryError("TF_CONFIG", "is not set; set it, or name a file: --path FILE")
        return cluster_hosts(environ["TF_CONFIG"], "TF_CONFIG")


def cluster_hosts(data: bytes | str, source: str) -> list[Host]:
    """The hosts that train.

    Args:
        data: the JSON of a TF_CONFIG, or of its cluster alone.
        source: what to name in errors.

    Raises:
        HostListError: it is not JSON.
        DiscoveryError: it has no cluster, nobody in it trains, or an address is not a host's.
    """
    cluster = _cluster(_loaded(data, source), source)
    hosts = added_up(
        _host(address, f"{source}: {place}")
        for job in _TRAINING
        for place, address in _addresses(cluster.get(job, []), job, source)
    )
    if not hosts:
        raise DiscoveryError(source, f"its cluster names no {', no '.join(_TRAINING)}")
    return hosts


def _loaded(data: bytes | str, source: str) -> Any:
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise HostListError(source, error.lineno, error.colno, f"is not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        problem = f"byte 0x{error.object[error.start]:02x} at {error.start} is not UTF-8"
        raise DiscoveryError(source, problem) from None


def _cluster(config: Any, source: str) -> dict[str, Any]:
    if isinstance(config, dict):
        cluster = config.get("cluster", config if any(job in config for job in _TRAINING) else None)
        if isinstance(cluster, dict):
            return cluster
    problem = 'has no cluster; it must be like {"cluster": {"worker": ["node1:2222", "node2:2222"]}}'
    raise DiscoveryError(source, problem)


def _addresses(job: Any, name: str, source: str) -> Iterator[tuple[str, Any]]:
    """Return where each address of a job is, and the address."""
    if isinstance(job, list):
        yield from ((f"{name}[{index}]", address) for index, address in enumerate(job))
    elif isinstance(job, dict):  # sparse: some of the tasks, by their number
        yield from ((f"{name}[{index}]", address) for index, address in job.items())
    else:
        problem = f'{name} is neither a list of addresses nor, like {{"0": "node1:2222"}}, some by number'
        raise DiscoveryError(source, problem)


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
