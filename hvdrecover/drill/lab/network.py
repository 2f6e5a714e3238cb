"""A lab's share of the machine: what it is called, who owns it, and how it is removed.

Everything a lab makes carries the lab's number in its name, so that whoever knows the number can remove all
of it. Its interfaces are in network namespaces of its own, the bridge too: the machine's own network and its
firewall are neither used nor seen, and the interfaces go with the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from hvdrecover import config
from hvdrecover.errors import LabError

PACKAGES = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}
PATIENCE = 30.0  # seconds to wait for anything
NETNS_FILES = Path("/etc/netns")  # `ip netns exec NAME` lays the files of NAME in here over those of /etc
_NAMESPACES = Path("/run/netns")
_NUMBERS = range(1, 255)  # the third byte of its addresses


def namespace(number: int | str, part: str) -> str:
    """The name of a lab's network namespace."""
    return f"hvdlab-{number}-{part}"


def folder(number: int | str) -> Path:
    """Return where a lab keeps its keys, logs and settings; only root may write beside it."""
    return Path(f"/run/hvdlab-{number}")


def find(name: str) -> str | None:
    """Return where a program is; None if there is none."""
    searched = config.environment().get("PATH", "")
    return shutil.which(name, path=f"{searched}:/usr/sbin:/sbin")  # a user's lacks root's


def program(name: str) -> str:
    """Return where a program is.

    Raises:
        LabError: there is none.
    """
    path = find(name)
    if path is None:
        remedy = f"apt-get install {PACKAGES[name]}" if name in PACKAGES else "install it"
        raise LabError(name, f"there is no such program; {remedy}")
    return path


def ip(*arguments: str) -> None:
    """Run iproute2's ``ip``.

    Raises:
        LabError: it failed.
    """
    done = subprocess.run([program("ip"), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        remedy = "the machine, or its container, must let root change networks (--privileged)"
        raise LabError(f"ip {' '.join(arguments)}", f"{done.stderr.strip()}; {remedy}")


def claim() -> tuple[int, socket.socket]:
    """Take a number that no other lab has.

    Returns:
        The number, and the claim to it: a socket bound to a name in the kernel, which only one can be. The
        claim ends when every process that holds the socket has closed it or is gone.

    Raises:
        LabError: all are taken.
    """
    for number in random.sample(_NUMBERS, len(_NUMBERS)):  # not one that was in use a moment ago
        if taken := _claim(number):
            return number, taken
    raise LabError("the lab", f"{len(_NUMBERS)} labs are in use on this machine; end one of them")


def traces(number: int | str) -> list[Path]:
    """Return what exists of a lab: names of namespaces, files and folders. ``*`` is any lab."""
    patterns = [_NAMESPACES / namespace(number, "*"), NETNS_FILES / namespace(number, "*"), folder(number)]
    return sorted(path for pattern in patterns for path in pattern.parent.glob(pattern.name))


def sweep() -> None:
    """Remove the labs of which all owners are gone."""
    found = (re.fullmatch(r"hvdlab-(\d+).*", path.name) for path in traces("*"))
    for number in {int(match[1]) for match in found if match}:
        if taken := _claim(number):
            with taken:
                remove(number)


def remove(number: int) -> None:
    """Remove all that a lab made: processes, namespaces with their interfaces, files.

    Raises:
        LabError: something of it could not be removed.
    """
    for path in traces(number):
        if path.parent == _NAMESPACES:
            remove_namespace(path.name)
        else:
            shutil.rmtree(path)


def remove_namespace(name: str) -> None:
    """SIGKILL the processes of a namespace and remove it, and its name.

    Raises:
        LabError: a process does not end.
    """
    # Held open, so that meanwhile no other namespace can get its identity.
    with (_NAMESPACES / name).open() as held:
        identity = os.fstat(held.fileno())
        _kill_inhabitants(identity)
        ip("netns", "delete", name)
        _kill_inhabitants(identity)  # those that had just entered


def processes(name: str) -> list[int]:
    """The ids of the processes in a namespace, which need not exist; none that has exited."""
    try:
        return list(_inhabitants((_NAMESPACES / name).stat()))
    except FileNotFoundError:
        return []


def _claim(number: int) -> socket.socket | None:
    claimed = socket.socket(socket.AF_UNIX)
    try:
        claimed.bind(f"\0hvdrecover-lab-{number}")
    except OSError:
        claimed.close()
        return None
    return claimed


def _inhabitants(identity: os.stat_result) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has exited
                if os.path.samestat((entry / "ns/net").stat(), identity):
                    yield int(entry.name)


def _kill_inhabitants(identity: os.stat_result) -> None:
    deadline = time.monotonic() + PATIENCE
    while living := list(_inhabitants(identity)):
        if time.monotonic() > deadline:
            raise LabError(f"processes {living}", "they do not end, though killed; dmesg may tell why")
        for process in living:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
