"""``python -m hvdrecover.doctor.host``: answers one question of the doctor about this host, and ends.

The question is JSON on stdin: ``{"variables": {}, "ask": function, "about": arguments}``. The answer is one
line of JSON on stdout after `MARK`: ``{"answer": …}`` or ``{"error": reason}``.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from hvdrecover import config, machine
from hvdrecover.checkpoint import inspection
from hvdrecover.checkpoint.arena import allocate
from hvdrecover.checkpoint.storage import TEMPORARY, Storage, open_storage
from hvdrecover.checkpoint.store import check_is_ours
from hvdrecover.discovery.sources import output_of
from hvdrecover.errors import DiscoveryError, StorageError, UnknownCommitError
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
_NBYTES = 1 << 25  # size of the file that the trial writes and reads


@dataclass(frozen=True)
class Facts:
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
    """Connect to all peers while they connect to this port; return the seconds or the error of each."""
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
        features = json.loads(output_of(command, environ, _LOADING).splitlines()[-1])
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
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


# -- the checkpoint root: commits and claims are only read ---------------------------------------------


def root(url: str) -> dict[str, Any]:
    """Describe a root, and leave a test file there for other hosts to `see`, until `clean` removes it."""
    opened = open_storage(url)
    check_is_ours(opened)
    try:
        entries = inspection.entries(opened)
    except UnknownCommitError:  # the root does not exist yet
        entries = []
    usable = next((entry for entry in entries if entry.is_whole), None)
    path = Path(opened.url.removeprefix("file://"))
    local = [path, *path.parents] if opened.url.startswith("file://") else []
    existing = next((folder for folder in local if folder.exists()), None)
    folder = f"{TEMPORARY}doctor-{uuid.uuid4().hex}"
    return {
        "url": opened.url,
        "commits": Counter(entry.state for entry in entries),
        "newest": usable and {"commit": usable.commit, "time": usable.time},
        "free": shutil.disk_usage(existing).free if existing is not None else None,
        "made": [str(each) for each in local if not each.exists()],
        "folder": folder,
        "problem": _write(opened, f"{folder}/written"),
    }


def _write(opened: Storage, path: str) -> str:
    """Write a file, and read it; return the problem, or an empty string."""
    buffer, back = allocate(_NBYTES), allocate(_NBYTES)
    buffer[:] = np.random.default_rng().integers(0, 256, _NBYTES, dtype=np.uint8)  # cannot be compressed
    try:
        opened.write(path, buffer)
        read = opened.read_into(path, back)
    except StorageError as error:
        return str(error)
    if read.size == _NBYTES and np.array_equal(back, buffer):
        return ""
    return "it reads other bytes than it wrote, so the disk, the server or the network is faulty"


def see(url: str, folder: str) -> bool:
    return open_storage(url).size(f"{folder}/written") is not None


def clean(url: str, folder: str, made: list[str]) -> None:
    open_storage(url).delete(folder)
    for each in made:
        with suppress(OSError):  # a job has started to use it
            Path(each).rmdir()


_QUESTIONS = {each.__name__: each for each in (facts, clock, reach, root, see, clean)}


def main() -> None:
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
