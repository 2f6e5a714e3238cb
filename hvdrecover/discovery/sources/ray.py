"""Hosts that are nodes of a Ray cluster.

Ray's tables are read from its control service, as ``ray status`` reads them. `ray.init` would register a job
of Ray's, with files of its own, at every look.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hvdrecover.discovery.hosts import Host, check_slots
from hvdrecover.errors import DiscoveryError

_MODULES = ("_private.services", "_private.state", "_raylet")
_ADDRESS = "RAY_ADDRESS"
_CONNECT = 2.0  # seconds for the control service to answer
_ROUNDING = 1e-6  # of resources, which are counted in ten-thousandths

Node = Mapping[str, Any]  # as ray.nodes() has it
Group = Mapping[str, Any]  # as ray.util.placement_group_table() has it


@dataclass(frozen=True)
class Ray:
    """The nodes of a Ray cluster that are alive, with a slot for each GPU, or CPU if no node has a GPU."""

    every: ClassVar[float] = 5.0  # the client takes a third of a second of a core to import, each time
    variables: ClassVar[tuple[str, ...]] = (_ADDRESS,)

    address: str = field(
        default="",
        metadata={"help": f"of the cluster's head, else {_ADDRESS}, else the cluster of this node"},
    )
    resource: str = field(
        default="",
        metadata={"help": "a slot for each of these that a node has, such as GPU, CPU or a custom one"},
    )
    placement_group: str = field(
        default="",
        metadata={"help": "only what this placement group has: its name or its id", "metavar": "GROUP"},
    )

    def hosts(self, environ: Mapping[str, str], timeout: float) -> list[Host]:
        """The nodes that are alive and not draining, and have any of the resource."""
        try:
            services, state, raylet = (importlib.import_module(f"ray.{name}") for name in _MODULES)
        except ImportError as error:
            problem = f"its tables can't be read ({error}); pip install 'hvdrecover[ray]'"
            raise DiscoveryError("Ray", problem) from error
        address = self.address or environ.get(_ADDRESS) or "auto"
        address = _own_cluster(services) if address == "auto" else address
        check_reachable(address, timeout)
        tables = state.GlobalState()
        # Nothing below is public. What another version does not have is an AttributeError or a TypeError.
        options = raylet.GcsClientOptions.create(
            address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
        )
        tables._initialize_global_state(options)
        draining = tables.get_draining_nodes()
        usable = [node for node in tables.node_table() if node["Alive"] and node["NodeID"] not in draining]
        if not self.placement_group:
            return hosts_of(usable, self.resource)
        group = find(tables.placement_group_table(), self.placement_group)
        return hosts_of([reserved(node, group) for node in usable], self.resource, bundles=True)


def hosts_of(nodes: Iterable[Node], resource: str = "", *, bundles: bool = False) -> list[Host]:
    """The hosts that nodes are.

    Args:
        nodes: those that can be used.
        resource: resource of which each is a slot; else GPUs, and where there are none CPUs or bundles.
        bundles: whether only what a placement group has of the nodes is given.

    Raises:
        DiscoveryError: two nodes can't be told apart by a name that ssh takes, or a node has too many slots,
            or no node has any of the resource.
    """
    nodes = list(nodes)
    wanted = resource or next((name for name in ("GPU", "bundles") if _any_has(nodes, name)), "CPU")
    counted = [(node, count) for node in nodes if (count := _count(node, wanted))]
    if nodes and not counted:
        where = "that the placement group has anything of " if bundles else ""
        raise DiscoveryError("Ray", f"none of the {len(nodes)} nodes {where}has a whole '{wanted}'")
    names = _names([node for node, _ in counted])
    for name, (_, count) in zip(names, counted, strict=True):
        if problem := check_slots(count):
            raise DiscoveryError(f"Ray's node {name}", problem)
    return [Host(name, count) for name, (_, count) in zip(names, counted, strict=True)]


def find(table: Mapping[str, Group], wanted: str) -> Group:
    """The placement group of a name or an id.

    Raises:
        DiscoveryError: there is none, or several have the name.
    """
    living = {key: group for key, group in table.items() if group["state"] != "REMOVED"}
    found = [key for key, group in living.items() if wanted in (key, group["name"])]
    if len(found) == 1:
        return living[found[0]]
    names = ", ".join(found) if found else ", ".join(group["name"] or key for key, group in living.items())
    there = f"there are {names or 'none'}"
    problem = f"{there}; name it by its id" if found else f"there is no such placement group; {there}"
    raise DiscoveryError(f"Ray's placement group '{wanted}'", problem)


def reserved(node: Node, group: Group) -> Node:
    """Return a node with what a placement group has reserved there, instead of all of its resources."""
    places: Mapping[int, str] = group["bundles_to_node_id"]
    mine = [group["bundles"][number] for number, place in places.items() if place == node["NodeID"]]
    totals: dict[str, float] = {"bundles": len(mine)}
    for bundle in mine:
        for name, amount in bundle.items():
            totals[name] = totals.get(name, 0.0) + amount
    return {**node, "Resources": totals}


def check_reachable(address: str, timeout: float) -> None:
    """Look whether Ray's control service is there; its client would wait for long, and end the process.

    Raises:
        DiscoveryError: it is not there, or the address is that of another service of Ray.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        problem = "is not the address of a Ray cluster's head; write --address HOST:6379"
        raise DiscoveryError(f"'{address}'", problem)
    try:
        socket.create_connection((host, int(port)), min(_CONNECT, timeout)).close()
    except OSError as error:
        problem = (
            f"does not answer ({error.strerror or error}); `ray status` tells whether there is a cluster"
        )
        raise DiscoveryError(f"Ray's head {address}", problem) from error


def _own_cluster(services: Any) -> str:
    try:
        return str(services.canonicalize_bootstrap_address_or_die("auto"))
    except ConnectionError as error:
        problem = f"is not set, and this node is not part of a cluster; set it, or give --address ({error})"
        raise DiscoveryError(_ADDRESS, problem) from error


def _count(node: Node, resource: str) -> int:
    return int(node["Resources"].get(resource, 0.0) + _ROUNDING)


def _any_has(nodes: Iterable[Node], resource: str) -> bool:
    return any(_count(node, resource) for node in nodes)


def _names(nodes: Collection[Node]) -> list[str]:
    """Return each node's address, or where several nodes have one, the names that they were started with."""
    addresses = [str(node["NodeManagerAddress"]) for node in nodes]
    names = [
        address if addresses.count(address) == 1 else str(node["NodeName"])
        for node, address in zip(nodes, addresses, strict=True)
    ]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problem = (
            "several nodes are there, which ssh can't tell apart; give each a name that ssh can reach "
            "(`ray start --node-name`), or start the job by hvdrecover.ray.run, which takes no ssh"
        )
        raise DiscoveryError(f"Ray's address {twice}", problem)
    return names
