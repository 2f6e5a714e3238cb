"""``python -m hvdrecover.doctor.host``: the process that answers the doctor's questions on one host.

1. The doctor starts this process by ssh, as ``horovodrun`` would start a worker. This tests ssh itself.
2. Each question is one JSON object on a line of stdin: ``{"ask": method of Host, "about": arguments}``.
3. Each answer is one line of JSON on stdout after `MARK`, since login scripts may print other lines.
4. At the end of stdin the process removes its test files and exits. A host that loses its connection gets no
   end of stdin, so the kernel ends the process after ten minutes without a question.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdrecover import config, host_memory
from hvdrecover.doctor import storage
from hvdrecover.install.edits import EDITS, Edit
from hvdrecover.install.edits.torch_wait import TORCH_WAIT
from hvdrecover.launch import processes
from hvdrecover.surroundings import source_towards, versions

MARK = "hvdrecover-host:"
_CONNECT = 3.0  # seconds for another host to accept a connection
_LONGEST = 600.0  # seconds without a question
_AT_ONCE = 64  # connections
_LOADING = 110.0  # seconds to import a framework; TensorFlow takes half a minute on a busy host
_LOOK = 0.1  # seconds between looks at the import
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_GPUS = Path("/proc/driver/nvidia/gpus")

# Horovod only warns if it was built for another version of the framework; here that is an error.
_LOAD = """
import importlib, json, sys, warnings
warnings.filterwarnings("error", "Framework .* installed with version")
hvd = importlib.import_module(f"horovod.{sys.argv[1]}")
print(json.dumps({name: bool(getattr(hvd, f"{name}_built")()) for name in ("gloo", "mpi", "nccl", "cuda")}))
"""


@dataclass(frozen=True)
class Facts:
    """Facts about a host, read without importing a framework.

    Attributes:
        executable: the Python interpreter.
        versions: package to its version, or None if it is not installed.
        lacks: names of our edits to Horovod's source that the installed Horovod does not have.
        interfaces: network interface to its IPv4 address.
        gpus: number of NVIDIA GPUs.
        memory: bytes that processes can still allocate.
        limited: whether a cgroup sets that limit.
        port: port on which the process accepts connections.
    """

    executable: str
    versions: Mapping[str, str | None]
    lacks: tuple[str, ...]
    interfaces: Mapping[str, str]
    gpus: int
    memory: int
    limited: bool
    port: int


class Host:
    """This host; each public method answers one question."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=1024)  # the kernel accepts connections
        self._trial: storage.Trial | None = None

    def adopt(self, variables: dict[str, str]) -> None:
        """Set the environment variables that a launcher would pass on."""
        config.adopt(variables)

    def facts(self) -> dict[str, Any]:
        """Return the `Facts` about this host."""
        free = host_memory.available()
        found = Facts(
            executable=sys.executable,
            versions=versions(),
            lacks=tuple(missing_edits()),
            interfaces=interfaces(),
            gpus=len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0,
            memory=free.nbytes,
            limited=free.limited,
            port=self._listener.getsockname()[1],
        )
        return asdict(found)

    def load(self, frameworks: list[str]) -> dict[str, dict[str, Any]]:
        """Import Horovod for each framework; returns ``built``, feature to bool, and ``error``, of each."""
        return {framework: _load(framework) for framework in frameworks}

    def clock(self) -> float:
        """Return the seconds since the Unix epoch."""
        return time.time()

    def resolve(self, names: list[str]) -> dict[str, str | None]:
        """Return each name's IPv4 address on this host; None if the name is unknown here."""
        return {name: _address(name) for name in names}

    def route(self, address: str) -> tuple[str, str]:
        """Return the interface, and its address, from which this host sends to an address."""
        source = source_towards(address)
        return next((name for name, each in interfaces().items() if each == source), ""), source

    def reach(self, peers: dict[str, tuple[str, int]]) -> dict[str, float | str]:
        """Connect to each peer's address and port; returns the seconds that it took, or the error."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(peers, pool.map(_connect, peers.values()), strict=True))

    def near(self, checkpoint: str | None) -> dict[str, Any] | None:
        """Return the near roots of this host, and the space for another one."""
        return storage.near(checkpoint)

    def root(self, url: str) -> dict[str, Any]:
        """Open a checkpoint root for trials; returns its contents."""
        self._trial = storage.Trial(url)
        return self._trial.look()

    def write(self) -> dict[str, Any]:
        """Write a file to the root, and read it."""
        assert self._trial is not None
        return self._trial.write()

    def create(self) -> dict[str, Any]:
        """Let several writers create one file at the root."""
        assert self._trial is not None
        return self._trial.create()

    def see(self, url: str, path: str) -> bool:
        """Return whether this host sees a file of a root."""
        return storage.sees(url, path)

    def clean(self) -> None:
        """Remove the test files from the root."""
        trial, self._trial = self._trial, None
        if trial is not None:
            trial.close()


def _load(framework: str) -> dict[str, Any]:
    environ = {**config.environment(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command, deadline = [sys.executable, "-c", _LOAD, framework], time.monotonic() + _LOADING
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complaints:
        process = processes.start(
            command, environ, stdin=subprocess.DEVNULL, stdout=printed, stderr=complaints
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return {"built": {}, "error": f"the import has not ended in {_LOADING:.0f} s"}
                # The doctor asks nothing meanwhile, so stdin is at its end: the doctor was interrupted.
                if select.select([sys.stdin], [], [], _LOOK)[0]:
                    raise SystemExit
        finally:
            process.kill_group()
            code = process.wait()
        file = complaints if code else printed
        file.seek(0)
        lines = file.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), processes.describe(code))
    return {"built": {}, "error": last} if code else {"built": json.loads(last), "error": ""}


def missing_edits() -> list[str]:
    """Return the names of our edits that the installed Horovod does not have.

    Compiled code does not show its edits. There, the version number that our builds have is the proof.
    """
    try:
        horovod = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return []
    folder, ours = Path(str(horovod.locate_file(""))), "hvdrecover" in horovod.version
    return [edit.name for edit in EDITS if _matters(edit) and not _has(folder, edit, ours=ours)]


def _matters(edit: Edit) -> bool:
    """Return whether recovery needs an edit, rather than the build or the speed of waiting."""
    return not edit.file.endswith("CMakeLists.txt") and edit not in TORCH_WAIT


def _has(folder: Path, edit: Edit, *, ours: bool) -> bool:
    if not edit.file.endswith(".py"):
        return ours
    try:
        return edit.new in (folder / edit.file).read_text()
    except OSError:
        return False


def interfaces() -> dict[str, str]:
    """Return each network interface that has an IPv4 address, with that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:  # the interface has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def _address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _connect(peer: tuple[str, int]) -> float | str:
    began = time.perf_counter()
    try:
        socket.create_connection((peer[0], peer[1]), _CONNECT).close()
    except OSError as error:
        return error.strerror or str(error)
    return time.perf_counter() - began


def _answer(host: Host, line: str) -> dict[str, Any]:
    question = json.loads(line)
    try:
        return {"answer": getattr(host, question["ask"])(*question["about"])}
    except Exception as error:  # the doctor reports it, and asks the next question
        return {"error": str(error) or repr(error)}


def main() -> None:
    """Answer questions until the end of stdin."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    host = Host()
    try:
        signal.setitimer(signal.ITIMER_REAL, _LONGEST)
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_REAL, _LONGEST)
            sys.stdout.write(f"{MARK}{json.dumps(_answer(host, line))}\n")
            sys.stdout.flush()
    finally:
        host.clean()


if __name__ == "__main__":
    main()
