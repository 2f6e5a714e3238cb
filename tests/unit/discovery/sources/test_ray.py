"""Nodes of a Ray cluster as hosts, from tables as Ray 2.60 gives them.

`tests/integration/test_ray_hosts.py` asks a real cluster.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hvdrecover.discovery.hosts import Host
from hvdrecover.discovery.sources.ray import check_reachable, find, hosts_of, reserved
from hvdrecover.errors import DiscoveryError


def node(address: str, name: str = "", **resources: float) -> dict[str, Any]:
    """As `ray.nodes()` has it; its id is its address, or its name if it has one."""
    return {
        "NodeID": name or address,
        "NodeManagerAddress": address,
        "NodeManagerHostname": "vm",
        "NodeName": name or address,
        "Resources": {"memory": 2.2e10, "object_store_memory": 8e7, f"node:{address}": 1.0, **resources},
    }


def group(places: dict[int, str | None], *bundles: dict[str, float], **facts: str) -> dict[str, Any]:
    return {
        "name": "",
        "state": "CREATED",
        "bundles": dict(enumerate(bundles)),
        "bundles_to_node_id": places,
        **facts,
    }


def test_a_slot_is_a_gpu_where_any_node_has_one() -> None:
    nodes = [node("10.0.0.1", CPU=8), node("10.0.0.2", CPU=64, GPU=8), node("10.0.0.3", CPU=64, GPU=4)]
    assert hosts_of(nodes) == [Host("10.0.0.2", 8), Host("10.0.0.3", 4)]


def test_without_gpus_a_slot_is_a_cpu() -> None:
    assert hosts_of([node("10.0.0.1", CPU=0), node("10.0.0.2", CPU=4)]) == [Host("10.0.0.2", 4)]


def test_a_resource_that_is_named_goes_first_and_parts_of_one_are_no_slot() -> None:
    nodes = [node("10.0.0.1", GPU=8, tpu=1.9999999), node("10.0.0.2", GPU=8), node("10.0.0.3", tpu=0.5)]
    assert hosts_of(nodes, "tpu") == [Host("10.0.0.1", 2)]


def test_a_cluster_without_nodes_names_no_host() -> None:
    assert hosts_of([]) == []


def test_no_node_with_the_resource_is_an_error() -> None:
    with pytest.raises(DiscoveryError, match=r"2 .*'NPU'"):
        hosts_of([node("10.0.0.1", CPU=4), node("10.0.0.2", CPU=4)], "NPU")


def test_more_slots_than_any_host_has_are_an_error() -> None:
    with pytest.raises(DiscoveryError, match=r"node 10\.0\.0\.1: 9999 "):
        hosts_of([node("10.0.0.1", CPU=9999)])


def test_nodes_of_one_address_go_by_the_names_that_they_were_given() -> None:
    nodes = [node("10.0.0.1", "a", CPU=1), node("10.0.0.1", "b", CPU=2), node("10.0.0.2", "c", CPU=3)]
    assert hosts_of(nodes) == [Host("a", 1), Host("b", 2), Host("10.0.0.2", 3)]


def test_nodes_of_one_address_are_not_taken_for_one_host() -> None:
    nodes = [node("10.0.0.1", CPU=1), node("10.0.0.1", CPU=2)]
    with pytest.raises(DiscoveryError) as caught:
        hosts_of(nodes)
    assert "10.0.0.1" in caught.value.source


def test_of_nodes_of_one_address_one_without_slots_does_not_matter() -> None:
    assert hosts_of([node("10.0.0.1", CPU=0), node("10.0.0.1", CPU=2)]) == [Host("10.0.0.1", 2)]


@pytest.mark.parametrize(
    ("bundles", "resource", "hosts"),
    [
        ([{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 1}, {"CPU": 8}], "", [Host("n1", 2), Host("n2", 1)]),
        ([{"CPU": 8}, {"CPU": 8}, {"CPU": 8}], "", [Host("n1", 2), Host("n2", 1)]),
        ([{"CPU": 8}, {"CPU": 8}, {"CPU": 8}], "CPU", [Host("n1", 16), Host("n2", 8)]),
    ],
    ids=["GPUs", "bundles", "a named resource"],
)
def test_slots_of_a_placement_group(
    bundles: list[dict[str, float]], resource: str, hosts: list[Host]
) -> None:
    placed = group({0: "n1", 1: "n2", 2: "n1"}, *bundles)
    nodes = [node("n1", CPU=64, GPU=8), node("n2", CPU=64, GPU=8), node("n3", CPU=64, GPU=8)]
    assert hosts_of([reserved(each, placed) for each in nodes], resource, bundles=True) == hosts


def test_a_bundle_that_lost_its_node_is_not_counted() -> None:
    placed = group({0: "n1", 1: None}, {"CPU": 1}, {"CPU": 1})
    assert hosts_of([reserved(node("n1", CPU=4), placed)], bundles=True) == [Host("n1", 1)]


def test_a_placement_group_is_found_by_name_or_id() -> None:
    table = {"0a": group({}, name="train"), "0b": group({}, name="")}
    assert find(table, "train") is table["0a"]
    assert find(table, "0b") is table["0b"]


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({}, "such .* none"),
        ({"0a": group({}, name="train", state="REMOVED"), "0b": group({}, name="other")}, " other"),
        (
            {"0a": group({}, name="train"), "0b": group({}, name="train")},
            " 0a, 0b; .* id",
        ),
    ],
    ids=["none", "one that was removed", "two of the name"],
)
def test_a_placement_group_that_is_not_found(groups: dict[str, Any], problem: str) -> None:
    with pytest.raises(DiscoveryError, match=problem):
        find(groups, "train")


@pytest.mark.parametrize("address", ["ray://head:10001", "http://127.0.0.1:8265", "head", ":6379"])
def test_addresses_of_other_services_are_refused(address: str) -> None:
    with pytest.raises(DiscoveryError, match="--address HOST:6379"):
        check_reachable(address, 60)


def test_a_head_that_is_not_there_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_reachable(f"127.0.0.1:{port}", 60)
    with pytest.raises(DiscoveryError, match=f"head 127.0.0.1:{port}: does not answer"):
        check_reachable(f"127.0.0.1:{port}", 60)
