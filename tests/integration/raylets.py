"""A real Ray cluster on this machine: a head without slots, and raylets that come and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="there is no ray; pip install -e '.[ray]'")

_MEMORY = 80_000_000  # bytes of each node's object store, the least that Ray takes


class Raylets:
    """The cluster.

    Attributes:
        address: of its head.
        environ: variables of what is to find it.
    """

    def __init__(self, folder: str) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _MEMORY}
        self._cluster: Any = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.address: str = self._cluster.address
        self.environ = {"RAY_ADDRESS": self.address, "RAY_TMPDIR": folder}

    def add(self, **facts: Any) -> Any:
        """Add a node, with what it has: ``num_cpus=2``."""
        return self._cluster.add_node(object_store_memory=_MEMORY, **facts)

    def kill(self, node: Any) -> None:
        """SIGKILL a raylet; its workers go with it."""
        self._cluster.remove_node(node, allow_graceful=False)

    def drain(self, node: Any) -> None:
        """Say that a node is about to be taken away, as an autoscaler does."""
        words = ["--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "a test", "--deadline-remaining-seconds", "600"]
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", self.address]
        subprocess.run([*command, *words], check=True, capture_output=True)

    def shutdown(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


@contextmanager
def raylets() -> Iterator[Raylets]:
    """A cluster, which is gone afterwards with all that it has written."""
    folder = tempfile.mkdtemp(prefix="hvdrecover-ray-", dir="/tmp")  # paths of sockets have to be short
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_TMPDIR", folder)
            patch.setenv("RAY_worker_niceness", "0")  # tests beside this one would starve them
            cluster = Raylets(folder)
            try:
                yield cluster
            finally:
                cluster.shutdown()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def environment(cluster: Raylets, **more: str) -> dict[str, str]:
    """The environment of a process that is to find the cluster."""
    return {**os.environ, **cluster.environ, **more}
