"""Health of hosts: checks of the ssh port and by a user's command, and what follows from several checks."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from hvdrecover.discovery.hosts import output_of
from hvdrecover.errors import DiscoveryError
from hvdrecover.machine import address_of, source_towards

CONNECT = 2.0  # seconds for a host to answer
_MARGIN = 0.25  # seconds to kill a command that hangs
_AT_ONCE = 256  # hosts; each check may take a socket or a process
_LOOPBACK = ("127.0.0.1", "127.0.1.1")  # addresses of this host's name; Debian uses the second
# horovodrun's own options for ssh, which must not wait for a person either.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no")

# One failed check may be chance, and each change of the hosts costs the job a resize.
FAILURES = 2  # failed checks in a row after which a healthy host is left out
RECOVERED = 3  # passed checks in a row after which an unhealthy host comes back
EVERY = 5.0  # seconds between two checks of a healthy host; an unhealthy one is checked at each call


@dataclass(frozen=True)
class Checks:
    """The checks to make."""

    ssh_port: int | None = 22  # must accept connections on other hosts; None skips this check
    identity: str | None = None  # ssh's private key, for the command
    command: str | None = None  # shell command that must succeed on each host; None skips this check

    @property
    def any(self) -> bool:
        return self.ssh_port is not None or self.command is not None


@dataclass(frozen=True)
class Health:
    """The health of one host, from its checks; times are in seconds since the epoch."""

    healthy: bool  # whether the host may be used
    since: float  # time of the last change
    checked: float  # time of the last check
    passed: float = 0.0  # time of the last check that found no problem; 0 before the first one
    streak: int = 0  # number of last checks in a row that contradict `healthy`
    why: str = ""  # the problem that the last failed check found


def update(before: Health | None, problem: str, now: float) -> Health:
    """Return a host's health after a check, which found no problem if ``problem`` is empty."""
    ok = not problem
    if before is None:
        return Health(ok, now, now, now if ok else 0.0, why=problem)
    streak = 0 if ok == before.healthy else before.streak + 1
    passed, why = (now if ok else before.passed), problem or before.why
    if streak == (RECOVERED if ok else FAILURES):
        return Health(ok, now, now, passed, why=why)
    return Health(before.healthy, before.since, now, passed, streak, why)


def is_due(health: Health | None, now: float) -> bool:
    if health is None or not health.healthy or health.streak:
        return True
    return not 0 <= now - health.checked < EVERY


def run(names: Sequence[str], checks: Checks, environ: Mapping[str, str], timeout: float) -> dict[str, str]:
    """Check hosts, all at once, the first ones first; all checks together may take `timeout` seconds.

    Return the problem of each host, '' if it passed. Hosts whose check has not begun in time are missing.
    Threads that still wait for a host may remain, so the calling process should end soon, by `os._exit`.
    """
    margin = min(_MARGIN, timeout / 4)
    deadline = time.monotonic() + timeout - margin
    pool = ThreadPoolExecutor(max_workers=min(_AT_ONCE, max(1, len(names))))
    futures = {name: pool.submit(problem_of, name, checks, environ, deadline) for name in names}
    wait(futures.values(), timeout - margin)
    pool.shutdown(wait=False, cancel_futures=True)
    wait([each for each in futures.values() if each.running()], margin)
    begun = {name: future for name, future in futures.items() if not future.cancelled()}
    late = f"no answer in {timeout:.2g} s"
    return {name: future.result() if future.done() else late for name, future in begun.items()}


def problem_of(name: str, checks: Checks, environ: Mapping[str, str], deadline: float) -> str:
    """Return the problem that the checks find on a host, or an empty string."""
    here = is_local(name)
    if checks.ssh_port is not None and not here:
        timeout = max(0.01, min(CONNECT, deadline - time.monotonic()))
        try:
            socket.create_connection((name, checks.ssh_port), timeout).close()
        except OSError as error:
            return f"port {checks.ssh_port} (ssh): {error.strerror or error}"
    if checks.command is None:
        return ""
    try:
        command = command_on(name, checks, here=here)
        output_of(command, environ, max(0.01, deadline - time.monotonic()))
    except DiscoveryError as error:
        return f"'{checks.command}' {error.problem}"
    return ""


def is_local(host: str) -> bool:
    """Return whether a name or an address is this host's."""
    if host in ("localhost", socket.gethostname()):
        return True
    address = address_of(host)
    if not address:
        return False
    return address in _LOOPBACK if address.startswith("127.") else address == source_towards(address)


def command_on(name: str, checks: Checks, *, here: bool, seconds: float = CONNECT) -> list[str]:
    """Return the command that runs the check: by the shell, or by ssh with ``seconds`` to connect."""
    if here:
        return ["sh", "-c", str(checks.command)]
    words = [*_SSH, "-o", f"ConnectTimeout={seconds:.0f}"]
    if checks.ssh_port is not None:
        words += ["-p", str(checks.ssh_port)]
    if checks.identity is not None:
        words += ["-i", checks.identity]
    return [*words, name, str(checks.command)]
