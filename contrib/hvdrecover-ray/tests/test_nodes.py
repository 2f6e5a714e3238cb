"""Nodes as hosts, from tables like those of Ray 2.60. `jobs/test_ray_nodes.py` asks Ray itself."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hvdrecover.discovery import Host
from hvdrecover.errors import DiscoveryError
from hvdrecover_ray.nodes import check_reachable, find_group, hosts_of, reserved


def node(address: str, name: str = "", **resources: float) -> dict[str, Any]:
    """An item of `ray.nodes()`. Its id is its name, or its address if it has no name."""
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


def test_each_gpu_is_a_slot_if_any_node_has_one() -> None:
    nodes = [node("10.0.0.1", CPU=8), node("10.0.0.2", CPU=64, GPU=8), node("10.0.0.3", CPU=64, GPU=4)]
    assert hosts_of(nodes) == [Host("10.0.0.2", 8), Host("10.0.0.3", 4)]


def test_without_gpus_each_cpu_is_a_slot() -> None:
    assert hosts_of([node("10.0.0.1", CPU=0), node("10.0.0.2", CPU=4)]) == [Host("10.0.0.2", 4)]


def test_each_whole_unit_of_a_named_resource_is_a_slot() -> None:
    nodes = [node("10.0.0.1", GPU=8, tpu=1.9999999), node("10.0.0.2", GPU=8), node("10.0.0.3", tpu=0.5)]
    assert hosts_of(nodes, "tpu") == [Host("10.0.0.1", 2)]


def test_a_cluster_without_nodes_has_no_hosts() -> None:
    assert hosts_of([]) == []


def test_a_resource_that_no_node_has_is_an_error() -> None:
    with pytest.raises(DiscoveryError, match=r"2 .*'NPU'"):
        hosts_of([node("10.0.0.1", CPU=4), node("10.0.0.2", CPU=4)], "NPU")


def test_nodes_that_share_an_address_have_their_own_names() -> None:
    nodes = [node("10.0.0.1", "a", CPU=1), node("10.0.0.1", "b", CPU=2), node("10.0.0.2", "c", CPU=3)]
    assert hosts_of(nodes) == [Host("a", 1), Host("b", 2), Host("10.0.0.2", 3)]


def test_nodes_that_share_an_address_and_have_no_names_are_an_error() -> None:
    nodes = [node("10.0.0.1", CPU=1), node("10.0.0.1", CPU=2)]
    with pytest.raises(DiscoveryError) as caught:
        hosts_of(nodes)
    assert "10.0.0.1" in caught.value.source


def test_a_node_without_slots_does_not_count_as_sharing_an_address() -> None:
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


def test_a_bundle_that_lost_its_node_does_not_count() -> None:
    placed = group({0: "n1", 1: None}, {"CPU": 1}, {"CPU": 1})
    assert hosts_of([reserved(node("n1", CPU=4), placed)], bundles=True) == [Host("n1", 1)]


def test_a_placement_group_is_found_by_name_or_id() -> None:
    table = {"0a": group({}, name="train"), "0b": group({}, name="")}
    assert find_group(table, "train") is table["0a"]
    assert find_group(table, "0b") is table["0b"]


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({}, "unknown .*none"),
        (
            {"0a": group({}, name="train", state="REMOVED"), "0b": group({}, name="other")},
            "unknown .*: other",
        ),
        (
            {"0a": group({}, name="train"), "0b": group({}, name="train")},
            "id of one: 0a, 0b",
        ),
    ],
    ids=["none", "a removed group", "two groups"],
)
def test_an_ambiguous_or_unknown_placement_group_is_an_error(groups: dict[str, Any], problem: str) -> None:
    with pytest.raises(DiscoveryError, match=problem):
        find_group(groups, "train")


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
