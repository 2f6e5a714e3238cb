"""Facts about a host, read without importing a framework; runs on the host itself."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from hvdrecover import host_memory
from hvdrecover.install.edits import EDITS, Edit
from hvdrecover.install.edits.torch_wait import TORCH_WAIT
from hvdrecover.surroundings import source_towards, versions

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_GPUS = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Horovod:
    """The installed Horovod.

    Attributes:
        built_for: framework to the version that it was compiled against, as the build has noted it.
        noted: ``mpi`` and ``gloo`` to whether they are built in, as far as the build has noted that.
        lacks: names of our edits to its source that it does not have.
    """

    built_for: dict[str, str] = field(default_factory=dict)
    noted: dict[str, bool] = field(default_factory=dict)
    lacks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class HostFacts:
    """One host.

    Attributes:
        name: as the host calls itself.
        executable: the Python interpreter that has answered.
        versions: package to its version, or None if it is not installed; Python and hvdrecover as well.
        horovod: the installed Horovod, or None.
        interfaces: network interface to its IPv4 address.
        gpus: number of NVIDIA GPUs.
        memory: bytes that processes can still have.
        limited: whether a cgroup, and not the host, limits the memory.
        port: where the host takes connections for as long as it is examined.
        machine: the same for hosts that are one machine, as containers may be.
    """

    name: str
    executable: str
    versions: dict[str, str | None]
    horovod: Horovod | None
    interfaces: dict[str, str]
    gpus: int
    memory: int
    limited: bool
    port: int
    machine: str = ""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> HostFacts:
        """Facts that came as JSON."""
        known = {**fields, "horovod": Horovod(**fields["horovod"]) if fields["horovod"] else None}
        return cls(**known)


def gather(port: int) -> HostFacts:
    """The facts of this host, which takes connections at a port."""
    free = host_memory.available()
    return HostFacts(
        name=socket.gethostname(),
        executable=sys.executable,
        versions=versions(),
        horovod=horovod(),
        interfaces=interfaces(),
        gpus=gpus(),
        memory=free.nbytes,
        limited=free.limited,
        port=port,
        machine=_BOOT.read_text().strip(),
    )


def gpus() -> int:
    """Return how many NVIDIA GPUs the driver has found."""
    return len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0


def horovod() -> Horovod | None:
    """The installed Horovod, as its files show it; None if there is none."""
    try:
        distribution = metadata.distribution("horovod")
    except metadata.PackageNotFoundError:
        return None
    ours = "hvdrecover" in distribution.version
    folder = Path(str(distribution.locate_file("")))
    lacks = [edit.name for edit in EDITS if _matters(edit) and not _has(folder, edit, ours=ours)]
    try:
        noted = json.loads((folder / "horovod" / "metadata.json").read_text())
    except (OSError, ValueError):
        noted = {}
    built_for = {"torch": noted.get("pytorch"), "tensorflow": noted.get("tensorflow")}
    return Horovod(
        {framework: version for framework, version in built_for.items() if version},
        {feature: noted[feature] == "TRUE" for feature in ("gloo", "mpi") if feature in noted},
        lacks,
    )


def _matters(edit: Edit) -> bool:
    """Return whether recovery relies on an edit.

    It does not on those of how Horovod is built, nor on a thread that sleeps while it waits for a tensor.
    """
    return not edit.file.endswith("CMakeLists.txt") and edit not in TORCH_WAIT


def _has(folder: Path, edit: Edit, *, ours: bool) -> bool:
    """Return whether the installed Horovod has an edit. Of compiled code, only its origin tells."""
    if not edit.file.endswith(".py"):
        return ours
    try:
        return edit.new in (folder / edit.file).read_text()
    except OSError:
        return False


def interfaces() -> dict[str, str]:
    """Each network interface that has an IPv4 address, and that address."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
            except OSError:  # it has none
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def route_to(address: str) -> tuple[str, str]:
    """The interface, and its address, by which this host sends to an IPv4 address; empty if by none."""
    own = source_towards(address)
    return next((name for name, each in interfaces().items() if each == own), ""), own
