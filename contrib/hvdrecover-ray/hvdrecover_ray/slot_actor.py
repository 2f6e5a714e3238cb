"""The actor that holds one slot. Ray gives it the slot's resources. Its slot server runs commands."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import LaunchError
from hvdrecover.launch.horovodrun import interface_of

_SERVER = "hvdrecover_ray.slot_server"


@dataclass(frozen=True)
class Slot:
    """Where a slot is.

    Attributes:
        node: Ray's id of the node.
        address: address of the node.
        port: port of the slot server.
        interface: network interface that has the address.
        devices: GPUs that Ray gave to the slot.
    """

    node: str
    address: str
    port: int
    interface: str
    devices: tuple[str, ...]

    @property
    def host(self) -> str:
        """Return the host name for Horovod. Several nodes may share an address, so the name has the id."""
        return f"{self.address}-{self.node[:8]}"


class SlotActor:
    """The actor.

    Args:
        key: key of the job.

    Raises:
        LaunchError: the slot server does not start, or no network interface has the node's address.
    """

    def __init__(self, key: str) -> None:
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        interfaces = interface_of(address)
        if not interfaces:
            raise LaunchError(
                address, "no network interface has this address, which Ray reports for the node"
            )
        self._server = subprocess.Popen(
            [sys.executable, "-m", _SERVER, address],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{key}\n".encode())
        self._server.stdin.flush()
        port = self._server.stdout.readline()
        if not port:
            raise LaunchError(address, f"the slot server did not start: exit code {self._server.wait()}")
        devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        self._slot = Slot(context.get_node_id(), address, int(port), interfaces[0], devices)

    def slot(self) -> Slot:
        """Return where the slot is."""
        return self._slot

    def wait(self) -> int:
        """Wait for the end of the slot server, and return its exit code."""
        return self._server.wait()


def python_path() -> str:
    """Return the folders in which this process finds modules, without those that every Python searches."""
    standard = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    added = [path or os.fspath(Path.cwd()) for path in sys.path if not _is_standard(path, standard)]
    return os.pathsep.join(dict.fromkeys(path for path in added if Path(path).is_dir()))


def _is_standard(path: str, standard: set[str]) -> bool:
    """Return whether a folder is Python's own, or the folder of the program that Ray starts workers with."""
    parts = Path(path).parts
    return path in standard or parts[-1:] == ("lib-dynload",) or parts[-3:] == ("ray", "_private", "workers")
