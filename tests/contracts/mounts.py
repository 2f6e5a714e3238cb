"""Shared file systems that are mounted twice on this machine, as two hosts would; each test is one of `LONG`.

They take root, and come from Debian: ``apt-get install sshfs moosefs-master moosefs-chunkserver
moosefs-client``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.contracts.servers import HOST, SSHD, SftpServer, die_with_parent, free_port

_PATIENCE = 30.0  # seconds
# MooseFS's servers don't talk to 127.0.0.1; this is an address for documentation, RFC 5737.
_ADDRESS = "198.51.100.9"
_NEEDED = {
    "sshfs": ["sshfs"],
    "moosefs": ["mfsmaster", "mfschunkserver", "mfsmount", "ip"],
}

Mounts = tuple[Path, Path]


@contextmanager
def sshfs(folder: Path) -> Iterator[Mounts]:
    """A folder of an OpenSSH server, mounted by sshfs."""
    _require("sshfs", SSHD is not None)
    (served := folder / "served").mkdir()
    server = SftpServer(folder)
    server.start()
    (folder / "known").write_text(server.known_hosts())
    ssh = [f"IdentityFile={server.key}", f"UserKnownHostsFile={folder}/known", "StrictHostKeyChecking=yes"]
    ssh += ["IdentitiesOnly=yes", "PreferredAuthentications=publickey"]
    flags = [flag for option in ssh for flag in ("-o", option)]
    command = ["sshfs", "-f", "-p", str(server.port), f"{server.user}@{HOST}:{served}", *flags]
    try:
        with _mounted(folder, lambda place: [*command, str(place)]) as places:
            yield places
    finally:
        server.stop()


@contextmanager
def moosefs(folder: Path) -> Iterator[Mounts]:
    """A MooseFS of a master and one chunk server."""
    _require("moosefs", True)
    with ExitStack() as stack:
        address = ["ip", "address", "{}", f"{_ADDRESS}/32", "dev", "lo"]
        subprocess.run([each.replace("{}", "add") for each in address], check=True)
        stack.callback(subprocess.run, [each.replace("{}", "delete") for each in address], check=True)
        port = _start_moosefs(folder, stack)
        command = ["mfsmount", "-f", "-H", _ADDRESS, "-P", str(port)]
        yield stack.enter_context(_mounted(folder, lambda place: [*command, str(place)]))


def _require(kind: str, has_server: bool) -> None:
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("mounting takes root and /dev/fuse")
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    missing = [name for name in _NEEDED[kind] if shutil.which(name, path=path) is None]
    if missing or not has_server:
        pytest.skip(f"there is no {', '.join(missing) or 'sshd'}; see tests/contracts/mounts.py")


@contextmanager
def _mounted(folder: Path, command: Callable[[Path], list[str]]) -> Iterator[Mounts]:
    """Mount a file system at two places, each by a process of its own."""
    places = (folder / "one", folder / "two")
    with ExitStack() as stack:
        for place in places:
            place.mkdir()
            stack.enter_context(_running(command(place), folder / f"{place.name}.log", place.is_mount))
            stack.callback(subprocess.run, ["umount", "--lazy", place], check=False)
        yield places


@contextmanager
def _running(command: list[str], log: Path, is_up: Callable[[], bool]) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=die_with_parent)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not is_up():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[0]} does not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


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
        config, log = folder / f"{name}.cfg", folder / f"{name}.log"
        config.write_text("\n".join([*common, *lines, ""]))
        command = [f"/usr/sbin/{name}", "-f", "-c", str(config), "start"]
        stack.enter_context(_running(command, log, lambda log=log: b"initialized" in log.read_bytes()))  # type: ignore[misc]
    return ports["MATOCL"]
