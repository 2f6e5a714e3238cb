"""The host source ``ray``: the nodes of a Ray cluster.

The source reads Ray's control service as ``ray status`` does. `ray.init` would register a job at Ray, with
its own files, for each look.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hvdrecover.discovery import Host, source
from hvdrecover.errors import DiscoveryError

_MODULES = ("_private.services", "_private.state", "_raylet")
_ADDRESS = "RAY_ADDRESS"
_CONNECT_SECONDS = 2.0  # for the control service to answer
_ROUNDING = 1e-6  # Ray counts resources in ten-thousandths

Node = Mapping[str, Any]  # an item of ray.nodes()
Group = Mapping[str, Any]  # a value of ray.util.placement_group_table()


@source(
    every=5.0,  # importing Ray takes a third of a second of a core for each look
    variables=(_ADDRESS,),
    address=f"address of the cluster's head (default: {_ADDRESS}, or this node's cluster)",
    resource="resource that makes a slot, such as GPU, CPU or a custom one",
    placement_group="count only this placement group: its name or its id",
)
def ray_nodes(
    environ: Mapping[str, str],
    timeout: float,
    address: str = "",
    resource: str = "",
    placement_group: str = "",
) -> list[Host]:
    """The nodes of a Ray cluster that are alive, with a slot for each GPU, or CPU if no node has a GPU."""
    try:
        services, state, raylet = (importlib.import_module(f"ray.{name}") for name in _MODULES)
    except ImportError as error:
        problem = f"its tables cannot be read with the installed version ({error})"
        raise DiscoveryError("Ray", problem) from error
    address = address or environ.get(_ADDRESS) or "auto"
    address = _own_cluster(services) if address == "auto" else address
    check_reachable(address, timeout)
    tables = state.GlobalState()
    # Nothing below is public. If another version lacks it, that is an AttributeError or a TypeError.
    options = raylet.GcsClientOptions.create(
        address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=False
    )
    tables._initialize_global_state(options)
    draining = tables.get_draining_nodes()
    usable = [node for node in tables.node_table() if node["Alive"] and node["NodeID"] not in draining]
    if not placement_group:
        return hosts_of(usable, resource)
    group = find_group(tables.placement_group_table(), placement_group)
    return hosts_of([reserved(node, group) for node in usable], resource, bundles=True)


def hosts_of(nodes: Iterable[Node], resource: str = "", *, bundles: bool = False) -> list[Host]:
    """Return the hosts of some nodes.

    Args:
        nodes: the usable nodes.
        resource: resource that makes a slot. By default GPUs; without GPUs, bundles or CPUs.
        bundles: whether the nodes have only what a placement group reserved.

    Raises:
        DiscoveryError: several nodes have one name, or no node has the resource.
    """
    nodes = list(nodes)
    wanted = resource or next((name for name in ("GPU", "bundles") if _any_has(nodes, name)), "CPU")
    counted = [(node, count) for node in nodes if (count := _count(node, wanted))]
    if nodes and not counted:
        where = "in the placement group " if bundles else ""
        raise DiscoveryError("Ray", f"none of the {len(nodes)} nodes {where}has a whole '{wanted}'")
    names = _names([node for node, _ in counted])
    return [Host(name, count) for name, (_, count) in zip(names, counted, strict=True)]


def find_group(table: Mapping[str, Group], wanted: str) -> Group:
    """Return the placement group with a name or an id.

    Raises:
        DiscoveryError: no placement group, or more than one, has the name.
    """
    groups = {key: group for key, group in table.items() if group["state"] != "REMOVED"}
    found = [key for key, group in groups.items() if wanted in (key, group["name"])]
    if len(found) == 1:
        return groups[found[0]]
    if found:
        problem = f"several have this name; use the id of one: {', '.join(found)}"
    else:
        names = ", ".join(group["name"] or key for key, group in groups.items())
        problem = f"is unknown (there are: {names or 'none'})"
    raise DiscoveryError(f"Ray's placement group '{wanted}'", problem)


def reserved(node: Node, group: Group) -> Node:
    """Return the node with the resources that a placement group reserved there, instead of all."""
    bundle_nodes: Mapping[int, str] = group["bundles_to_node_id"]
    mine = [group["bundles"][number] for number, key in bundle_nodes.items() if key == node["NodeID"]]
    totals: dict[str, float] = {"bundles": len(mine)}
    for bundle in mine:
        for name, amount in bundle.items():
            totals[name] = totals.get(name, 0.0) + amount
    return {**node, "Resources": totals}


def check_reachable(address: str, timeout: float) -> None:
    """Check that Ray's control service answers. Its client would wait for long, and then end the process.

    Raises:
        DiscoveryError: it does not answer, or the address belongs to another service of Ray.
    """
    host, _, port = address.rpartition(":")
    if "/" in address or not host or not port.isdecimal():
        problem = "is not the address of a Ray cluster's head; write --address HOST:6379"
        raise DiscoveryError(f"'{address}'", problem)
    try:
        socket.create_connection((host, int(port)), min(_CONNECT_SECONDS, timeout)).close()
    except OSError as error:
        problem = f"does not answer ({error.strerror or error}). Run `ray status` to see the cluster"
        raise DiscoveryError(f"Ray's head {address}", problem) from error


def _own_cluster(services: Any) -> str:
    try:
        return str(services.canonicalize_bootstrap_address_or_die("auto"))
    except ConnectionError as error:
        problem = f"is not set, and this host is not a node of a cluster. Set it, or use --address ({error})"
        raise DiscoveryError(_ADDRESS, problem) from error


def _count(node: Node, resource: str) -> int:
    return int(node["Resources"].get(resource, 0.0) + _ROUNDING)


def _any_has(nodes: Iterable[Node], resource: str) -> bool:
    return any(_count(node, resource) for node in nodes)


def _names(nodes: Collection[Node]) -> list[str]:
    """Return the address of each node. Nodes that share an address have the names they were started with."""
    addresses = [str(node["NodeManagerAddress"]) for node in nodes]
    names = [
        address if addresses.count(address) == 1 else str(node["NodeName"])
        for node, address in zip(nodes, addresses, strict=True)
    ]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        problem = (
            "several nodes have this address, so ssh cannot tell them apart. Give each node a name that ssh "
            "can reach (`ray start --node-name`), or start the job by hvdrecover_ray.run, which needs no ssh"
        )
        raise DiscoveryError(f"Ray's address {twice}", problem)
    return names
