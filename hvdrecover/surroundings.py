"""The machine that a process runs on, and the versions that are installed there; no framework is imported."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import Distribution

from hvdrecover.bounded import Bounded
from hvdrecover.version import __version__

_RESOLVING = 5.0  # seconds for the name of a host to be resolved


def version_of(distribution: str, search: Sequence[str] | None = None) -> str | None:
    """Return the installed version of a distribution, or None; ``search`` replaces ``sys.path``."""
    where = list(sys.path if search is None else search)
    for found in Distribution.discover(name=distribution, path=where):
        if "Version" in found.metadata:
            return found.version
    return None


def versions() -> dict[str, str | None]:
    """Return package to its version, or None if it is not installed; Python and hvdrecover as well."""
    found: dict[str, str | None] = {"python": platform.python_version(), "hvdrecover": __version__}
    for package in ("torch", "tensorflow", "keras", "horovod", "mpi4py"):
        found[package] = version_of(package)
    found["tensorflow"] = found["tensorflow"] or version_of("tensorflow-cpu")
    return found


def address_of(host: str) -> str:
    """Return a host's IPv4 address; empty if its name is unknown, or not resolved in time."""
    try:
        return Bounded(_RESOLVING)(socket.gethostbyname, host)
    except OSError:
        return ""


def source_towards(host: str) -> str:
    """Return the IPv4 address from which this host sends to another one; empty if there is no way."""
    address = address_of(host)
    if not address:
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def machine() -> str:
    """Return the system of this machine and how many processors this process may use, in a few words."""
    return f"{platform.system()} {platform.machine()}, {len(os.sched_getaffinity(0))} processors"
