"""`hvdrecover discover ray` lists the nodes of a real Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.discovery import Host
from hvdrecover.errors import DiscoveryError
from hvdrecover_ray.nodes import ray_nodes
from raylets import Raylets, environment, raylets

PATIENCE = 60.0  # seconds
RESERVE = """\
import sys, ray
from ray.util.placement_group import placement_group
ray.init(log_to_driver=False)
group = placement_group([{"CPU": 1}] * 3, strategy="PACK", name="train", lifetime="detached")
ray.get(group.ready())
print(group.id.hex())
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    with raylets() as started:
        yield started


def hosts(cluster: Raylets, **options: str) -> list[Host]:
    return sorted(ray_nodes(cluster.environ, PATIENCE, **options), key=lambda host: host.name)


def test_living_nodes_are_hosts(cluster: Raylets, tmp_path: Path) -> None:
    """One test, because a cluster takes a while to start."""
    with pytest.raises(DiscoveryError, match="none of the 1 nodes has a whole 'CPU'"):
        hosts(cluster)  # the head alone
    first = cluster.add(num_cpus=2, node_name="n1")
    address = first.node_ip_address
    assert hosts(cluster) == [Host(address, 2)]

    second = cluster.add(num_cpus=4, node_name="n2", resources={"tpu": 1})
    assert hosts(cluster) == [Host("n1", 2), Host("n2", 4)]
    assert hosts(cluster, resource="tpu") == [Host(address, 1)]

    reserved = subprocess.run(
        [sys.executable, "-c", RESERVE], env=environment(cluster), capture_output=True, text=True, timeout=120
    )
    assert reserved.returncode == 0, reserved.stderr
    by_name = hosts(cluster, placement_group="train")
    assert by_name == hosts(cluster, placement_group=reserved.stdout.strip())
    assert sum(host.slots or 0 for host in by_name) == 3

    command = [sys.executable, "-m", "hvdrecover", "discover", "ray", "--cache", os.fspath(tmp_path)]
    discovered = subprocess.run(
        [*command, "--no-ssh-check"], env=environment(cluster), capture_output=True, text=True, timeout=120
    )
    assert (sorted(discovered.stdout.splitlines()), discovered.stderr) == (["n1:2", "n2:4"], "")

    cluster.kill(second)
    deadline = time.monotonic() + PATIENCE  # for Ray to notice
    while (found := hosts(cluster)) != [Host(address, 2)] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found == [Host(address, 2)]


def test_a_stopped_cluster_is_an_error() -> None:
    with raylets() as started:
        started.shutdown()
        with pytest.raises(DiscoveryError, match=f"head {started.address}: does not answer"):
            hosts(started)
