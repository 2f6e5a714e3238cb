"""MooseFS, mounted twice on this machine, as two hosts would; each test is one of `LONG`.

It takes root, and comes from Debian: ``apt-get install moosefs-master moosefs-chunkserver moosefs-client``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.contracts.servers import Server, free_port

# MooseFS's servers don't talk to 127.0.0.1; this is one for documentation, RFC 5737, and of this process.
_ADDRESS = f"198.51.100.{os.getpid() % 250 + 1}"
_NEEDED = ("mfsmaster", "mfschunkserver", "mfsmount", "ip")

Mounts = tuple[Path, Path]


@contextmanager
def moosefs(folder: Path) -> Iterator[Mounts]:
    """A MooseFS of a master and one chunk server."""
    _require()
    with ExitStack() as stack:
        address = ["ip", "address", "{}", f"{_ADDRESS}/32", "dev", "lo"]
        subprocess.run([each.replace("{}", "add") for each in address], check=True)
        stack.callback(subprocess.run, [each.replace("{}", "delete") for each in address], check=True)
        port = _start_moosefs(folder, stack)
        places = (folder / "one", folder / "two")
        for place in places:
            place.mkdir()
            command = ["mfsmount", "-f", "-H", _ADDRESS, "-P", str(port), str(place)]
            _run(_Program(command, folder, place.name, place.is_mount), stack)
            stack.callback(subprocess.run, ["umount", "--lazy", place], check=False)
        yield places


def _require() -> None:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounting takes root and /dev/fuse")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in _NEEDED if shutil.which(name, path=path) is None]:
        pytest.skip(f"there is no {', '.join(missing)}; see tests/contracts/mounts.py")


class _Program(Server):
    """A program of MooseFS, with its own log, that is up when a function says so."""

    def __init__(self, command: list[str], folder: Path, name: str, is_up: Callable[[], bool]) -> None:
        super().__init__(command, folder)
        self.log = folder / f"{name}.log"
        self.is_up = is_up  # type: ignore[method-assign]


def _run(program: Server, stack: ExitStack) -> None:
    program.start()
    stack.callback(program.stop)


def _start_moosefs(folder: Path, stack: ExitStack) -> int:
    """Start the master and the chunk server; return the port for clients."""
    ports = {name: free_port() for name in ("MATOCL", "MATOCS", "MATOML")}
    data = {name: folder / name for name in ("master", "chunks", "disk")}
    for path in data.values():
        path.mkdir()
    (data["master"] / "metadata.mfs").write_bytes(b"MFSM NEW")
    (folder / "exports").write_text("* / rw,alldirs,admin,maproot=0:0\n")
    (folder / "disks").write_text(f"{data['disk']}\n")
    common = ["WORKING_USER = root", "WORKING_GROUP = root", "NICE_LEVEL = 0"]
    master = [f"{name}_LISTEN_PORT = {port}" for name, port in ports.items()]
    master += [f"{name}_LISTEN_HOST = {_ADDRESS}" for name in ports]
    master += [f"DATA_PATH = {data['master']}", f"EXPORTS_FILENAME = {folder}/exports"]
    chunks = [f"MASTER_HOST = {_ADDRESS}", f"MASTER_PORT = {ports['MATOCS']}", "HDD_TEST_FREQ = 0"]
    chunks += [
        f"CSSERV_LISTEN_HOST = {_ADDRESS}",
        f"CSSERV_LISTEN_PORT = {free_port()}",
        f"BIND_HOST = {_ADDRESS}",
    ]
    chunks += [f"DATA_PATH = {data['chunks']}", f"HDD_CONF_FILENAME = {folder}/disks"]
    for name, lines in (("mfsmaster", master), ("mfschunkserver", chunks)):
        config = folder / f"{name}.cfg"
        config.write_text("\n".join([*common, *lines, ""]))
        log = folder / f"{name}.log"
        command = [f"/usr/sbin/{name}", "-f", "-c", str(config), "start"]
        _run(_Program(command, folder, name, lambda log=log: b"initialized" in log.read_bytes()), stack)  # type: ignore[misc]
    return ports["MATOCL"]
