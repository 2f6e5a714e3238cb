"""``python -m hvdrecover.doctor.host``: answers one question of the doctor about this host, and ends.

The question is JSON on stdin: ``{"variables": {}, "ask": function, "about": arguments}``. The answer is one
line of JSON on stdout after `MARK`: ``{"answer": …}`` or ``{"error": reason}``.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdrecover import config, machine
from hvdrecover.discovery import programs
from hvdrecover.doctor.storage import clean, root, see
from hvdrecover.errors import DiscoveryError
from hvdrecover.install.edits import EDITS
from hvdrecover.install.environment import PROBE
from hvdrecover.machine import address_of, source_towards, versions

MARK = "hvdrecover-host:"
FRAMEWORKS = ("torch", "tensorflow")
_CONNECT = 3.0  # seconds for another host to accept a connection
_MEETING = 10.0  # seconds for all hosts to be listening
_LONGEST = 300  # seconds; the doctor may have ended, or the connection to it
_AT_ONCE = 64  # connections
_LOADING = 110.0  # seconds to import a framework; TensorFlow takes half a minute on a busy host
_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Facts:
    """Facts about a host."""

    versions: Mapping[str, str | None]
    horovod: Mapping[str, str]  # framework to the error of importing Horovod for it, or ''
    features: Mapping[str, bool]  # feature to whether Horovod has it; empty if it cannot be imported
    lacks: Sequence[str]  # our edits that recovery needs and Horovod lacks
    interfaces: Mapping[str, str]  # network interface to its IPv4 address
    addresses: Mapping[str, str]  # other host to its address, as this host knows it
    source: str  # this host's address towards the others, or ''
    gpus: int
    memory: int  # bytes that are available
    port: int  # a free one


def facts(name: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the `Facts` about this host."""
    found = versions()
    frameworks = [each for each in FRAMEWORKS if found["horovod"] and found[each]]
    tried = {framework: _load(framework) for framework in frameworks}
    known = {each: address_of(each) for each in names if each != name}
    others = {each: address for each, address in known.items() if address and address[:4] != "127."}
    with socket.create_server(("", 0)) as probe:
        port = probe.getsockname()[1]
    return asdict(
        Facts(
            versions=found,
            horovod={framework: error for framework, (_, error) in tried.items()},
            features=next((features for features, _ in tried.values() if features), {}),
            lacks=missing_edits(),
            interfaces=interfaces(),
            addresses=others,
            source=next(filter(None, map(source_towards, others.values())), ""),
            gpus=len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0,
            memory=machine.available_memory().nbytes,
            port=port,
        )
    )


def clock() -> float:
    return time.time()


def reach(port: int, peers: dict[str, tuple[str, int]]) -> dict[str, float | str]:
    """Connect to each peer's address and port, while peers connect to this port.

    Return peer to the seconds that the connection took, or to the error.
    """
    deadline = time.monotonic() + _MEETING
    with socket.create_server(("", port), backlog=1024) as listener, ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(lambda peer: _connect(peer, deadline), peers.values()))
        with suppress(TimeoutError):
            for _ in peers:  # those that have started later, too
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                listener.accept()[0].close()
    return dict(zip(peers, found, strict=True))


def _connect(peer: tuple[str, int], deadline: float) -> float | str:
    while True:
        began = time.monotonic()
        try:
            socket.create_connection((peer[0], peer[1]), _CONNECT).close()
            return time.monotonic() - began
        except OSError as error:  # the peer may not be listening yet
            if time.monotonic() > deadline - _CONNECT:
                return error.strerror or str(error)
        time.sleep(0.1)


def _load(framework: str) -> tuple[dict[str, bool], str]:
    """Import Horovod for a framework; return feature to whether it is built in, and the error or ''."""
    environ = {**config.environment(), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", PROBE, f"horovod.{framework}"]
    try:
        features = json.loads(programs.output(command, environ, _LOADING).splitlines()[-1])
    except DiscoveryError as error:
        return {}, error.problem
    del features["version"]
    return features, ""


def missing_edits() -> list[str]:
    """Return the names of those edits that recovery needs and the installed Horovod lacks."""
    try:
        horovod = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return []
    folder, ours = Path(str(horovod.locate_file(""))), "hvdrecover" in horovod.version
    lacking = []
    for edit in EDITS:
        file = folder / edit.file
        # Recovery does not need the edits of the build and of the speed of waiting.
        needed = not edit.file.endswith("CMakeLists.txt") and not edit.name.startswith("torch-wait")
        # Compiled code does not show its edits. The version number that our builds have is the proof.
        has = ours if file.suffix != ".py" else file.exists() and edit.new in file.read_text()
        if needed and not has:
            lacking.append(edit.name)
    return lacking


def interfaces() -> dict[str, str]:
    """Return each network interface that has an IPv4 address, with that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


_QUESTIONS = {each.__name__: each for each in (facts, clock, reach, root, see, clean)}


def main() -> None:
    """Answer the question."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST)
    question = json.load(sys.stdin)
    config.adopt(question["variables"])
    try:
        told: dict[str, Any] = {"answer": _QUESTIONS[question["ask"]](*question["about"])}
    except Exception as error:  # the doctor reports it
        told = {"error": str(error) or repr(error)}
    sys.stdout.write(f"{MARK}{json.dumps(told)}\n")


if __name__ == "__main__":
    main()
