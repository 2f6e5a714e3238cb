"""The actor that holds one slot: Ray gives it the slot's resources, and its seat runs commands with them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from hvdrecover.errors import LaunchError
from hvdrecover.launch.horovodrun import interface_of

_SEAT = "hvdrecover.ray.seat"


@dataclass(frozen=True)
class Place:
    """The place of a slot.

    Attributes:
        node: id of its node.
        address: of its node.
        port: of its seat.
        interface: the network interface that has the address.
        devices: the GPUs that Ray has given it.
    """

    node: str
    address: str
    port: int
    interface: str
    devices: tuple[str, ...]

    @property
    def host(self) -> str:
        """Return the name of its host; several nodes may have one address."""
        return f"{self.address}-{self.node[:8]}"


class Slot:
    """The actor.

    Args:
        key: what who wants to use it must know.

    Raises:
        LaunchError: its seat does not start, or there is no network interface with the node's address.
    """

    def __init__(self, key: str) -> None:
        import ray

        context = ray.get_runtime_context()
        address = ray.util.get_node_ip_address()
        interfaces = interface_of(address)
        if not interfaces:
            raise LaunchError(address, "no network interface has this address, which Ray has of its node")
        self._seat = subprocess.Popen(
            [sys.executable, "-m", _SEAT, address],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._seat.stdin is not None and self._seat.stdout is not None
        self._seat.stdin.write(f"{key}\n".encode())
        self._seat.stdin.flush()
        port = self._seat.stdout.readline()
        if not port:
            raise LaunchError(address, f"a seat has not started: exit code {self._seat.wait()}")
        devices = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        self._place = Place(context.get_node_id(), address, int(port), interfaces[0], devices)

    def place(self) -> Place:
        """The place of the slot."""
        return self._place

    def hold(self) -> int:
        """Wait for the end of the seat, which is this actor's, too."""
        return self._seat.wait()


def python_path() -> str:
    """The folders in which this process finds modules besides its Python's own, for what it starts."""
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    ours = [
        path for path in sys.path if Path(path).is_dir() and path not in own and not _of_python(path, own)
    ]
    return os.pathsep.join(dict.fromkeys(path or os.fspath(Path.cwd()) for path in ours))


def _of_python(path: str, own: set[str]) -> bool:
    """Return whether it is of Python's own modules, or of the program that Ray starts its workers by."""
    name = Path(path)
    return name.name == "lib-dynload" or name.parts[-3:] == ("ray", "_private", "workers")
