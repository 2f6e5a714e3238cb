"""A Ray cluster whose nodes are the hosts of a lab: the first is its head, without slots."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdrecover.drill.lab import Host, Lab
from raylets import MEMORY

_PORT = 6379
_START = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
_PATIENCE = 120.0  # seconds


class Nodes:
    """The cluster.

    Attributes:
        environ: variables with which processes on the first host find the cluster.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._folder = folder
        self._head = lab.hosts[0]
        self._address = f"{self._head.address}:{_PORT}"
        # By default workers have a low priority. Beside other tests they would starve.
        self.environ = {
            "RAY_ADDRESS": self._address,
            "RAY_TMPDIR": os.fspath(folder),
            "RAY_worker_niceness": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self._start(
            self._head, "--head", "--port", str(_PORT), "--num-cpus", "0", "--include-dashboard=false"
        )
        for host in lab.hosts[1:]:
            self.join(host)

    def join(self, host: Host) -> None:
        """Start a node on a host, with room for one process."""
        self._start(host, "--address", self._address, "--num-cpus", "1")

    def _start(self, host: Host, *words: str) -> None:
        """Start a node, and wait until it has joined."""
        log = self._folder / f"{host.name}-{len(self._started)}.log"
        own = ["--node-ip-address", host.address, "--object-store-memory", str(MEMORY)]
        with log.open("wb") as output:
            command = host.command([*_START, *words, *own])
            environ = {**os.environ, **self.environ}
            self._started.append(
                subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
        deadline = time.monotonic() + _PATIENCE
        while "Ray runtime started." not in log.read_text():
            assert self._started[-1].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def reap(self) -> None:
        """Wait for the processes that ended with the lab."""
        for each in self._started:
            each.wait(_PATIENCE)


@contextmanager
def ray_nodes() -> Iterator[tuple[Lab, Nodes]]:
    """Run a cluster on a lab of three hosts."""
    folder = Path(tempfile.mkdtemp(prefix="hvdrecover-ray-", dir="/tmp"))  # paths of sockets must be short
    try:
        with Lab() as lab:
            nodes = Nodes(lab, folder)
            yield lab, nodes
        nodes.reap()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
