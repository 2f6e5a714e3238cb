"""Checks of hosts: whether their ssh port answers, and whether a user's command succeeds there."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from hvdrecover.discovery import programs
from hvdrecover.errors import DiscoveryError
from hvdrecover.surroundings import address_of, source_towards

CONNECT = 2.0  # seconds for a host to answer
_MARGIN = 0.25  # seconds for a command that hangs to be killed
_AT_ONCE = 256  # hosts; each may take a socket or a process
_OWN = ("127.0.0.1", "127.0.1.1")  # what names of this host stand for; Debian has the second
# As horovodrun calls ssh, which must not wait for a person either.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no")


@dataclass(frozen=True)
class Checks:
    """The checks to make.

    Attributes:
        ssh_port: port that must accept connections; None checks none. This host's need not.
        identity: ssh's private key, for the command.
        command: shell command that must succeed on each host; None runs none.
    """

    ssh_port: int | None = 22
    identity: str | None = None
    command: str | None = None

    @property
    def any(self) -> bool:
        """Return whether there is anything to check."""
        return self.ssh_port is not None or self.command is not None


def run(names: Sequence[str], checks: Checks, environ: Mapping[str, str], timeout: float) -> dict[str, str]:
    """Check hosts, all of them at once.

    Threads may be left over that wait for something, so the process should end soon and at once.

    Args:
        names: the hosts, those first that matter most.
        checks: what to check.
        environ: the environment.
        timeout: seconds that all of it may take.

    Returns:
        What is wrong with each; an empty string if nothing is. A host whose turn did not come is missing.
    """
    begun: set[str] = set()
    # The caller ends at once when the time is over, and would leave what is running then.
    deadline = time.monotonic() + timeout - min(_MARGIN, timeout / 4)

    def check(name: str) -> str | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        begun.add(name)
        return problem_of(name, checks, environ, left)

    pool = ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(names))))
    futures = {pool.submit(check, name): name for name in names}
    done, late = wait(futures, timeout=timeout)
    pool.shutdown(wait=False, cancel_futures=True)
    found = {futures[each]: problem for each in done if (problem := each.result()) is not None}
    found.update(
        {name: f"no answer in {timeout:.2g} s" for name in map(futures.__getitem__, late) if name in begun}
    )
    return found


def problem_of(name: str, checks: Checks, environ: Mapping[str, str], timeout: float) -> str:
    """Return what is wrong with a host; an empty string if nothing is."""
    deadline = time.monotonic() + timeout
    here = is_local(name)
    if checks.ssh_port is not None and not here:
        try:
            socket.create_connection((name, checks.ssh_port), min(CONNECT, timeout)).close()
        except OSError as error:
            return f"port {checks.ssh_port} (ssh): {error.strerror or error}"
    if checks.command is None:
        return ""
    if (left := deadline - time.monotonic()) <= 0:
        return f"no answer in {timeout:.2g} s"
    try:
        programs.output(command_on(name, checks, here=here), environ, left)
    except DiscoveryError as error:
        return f"'{checks.command}' {error.problem}"
    return ""


def is_local(host: str) -> bool:
    """Return whether a name, or an address, stands for this host."""
    if host in ("localhost", socket.gethostname()):
        return True
    address = address_of(host)
    if not address:
        return False
    return address in _OWN if address.startswith("127.") else address == source_towards(address)


def command_on(name: str, checks: Checks, *, here: bool, seconds: float = CONNECT) -> list[str]:
    """Return what runs the command on a host: by ssh, or if it is this one, by its shell.

    Args:
        name: the host.
        checks: the command, and how ssh gets there.
        here: whether it is this host.
        seconds: for the host's ssh server to answer.
    """
    if here:
        return ["sh", "-c", str(checks.command)]
    words = [*_SSH, "-o", f"ConnectTimeout={seconds:.0f}"]
    words += ["-p", str(checks.ssh_port)] if checks.ssh_port is not None else []
    return [
        *words,
        *(["-i", checks.identity] if checks.identity is not None else []),
        name,
        str(checks.command),
    ]
