"""A real Ray cluster on this machine: a head without slots, and raylets that come and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import pytest

INSTALL = ".venv/bin/pip install --editable contrib/hvdrecover-ray"
if not metadata.entry_points(group="hvdrecover.remote_shells", name="ray"):
    pytest.skip(f"hvdrecover-ray is not installed; {INSTALL}", allow_module_level=True)
cluster_utils = pytest.importorskip("ray.cluster_utils", reason=f"ray is not installed; {INSTALL}")

MEMORY = 80_000_000  # bytes of each node's object store: Ray's minimum


class Raylets:
    """The cluster.

    Attributes:
        address: address of the head.
        environ: variables with which processes find the cluster.
    """

    def __init__(self, folder: str) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": MEMORY}
        self._cluster: Any = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.environ = {"RAY_ADDRESS": self.address, "RAY_TMPDIR": folder}

    def add(self, **facts: Any) -> Any:
        """Add a node with some resources: ``num_cpus=2``."""
        return self._cluster.add_node(object_store_memory=MEMORY, **facts)

    def kill(self, node: Any) -> None:
        """Kill a raylet and its workers."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any) -> None:
        """Announce that a node will be taken away, as an autoscaler does."""
        words = ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "a test", "--deadline-remaining-seconds", "600"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        subprocess.run([*command, *words], check=True, capture_output=True)

    def shutdown(self) -> None:
        """Stop the cluster."""
        self._cluster.shutdown()


@contextmanager
def raylets() -> Iterator[Raylets]:
    """Run a cluster, and remove all of it afterwards."""
    folder = tempfile.mkdtemp(prefix="hvdrecover-ray-", dir="/tmp")  # paths of sockets must be short
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            patch.setenv("RAY_worker_niceness", "0")  # low priority would starve processes beside other tests
            cluster = Raylets(folder)
            try:
                yield cluster
            finally:
                cluster.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(cluster: Raylets, **more: str) -> dict[str, str]:
    """Return the environment of a process that uses the cluster."""
    return {**os.environ, **cluster.environ, **more}
