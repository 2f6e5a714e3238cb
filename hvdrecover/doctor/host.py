"""``python -m hvdrecover.doctor.host``: one host answers for itself.

It reads questions, one JSON object a line, and answers each with a line of JSON behind `MARK`, until its
input ends. So one ssh connection serves for all that is asked of a host; and whoever is gone asks no more,
so that the process ends and takes with it what it has made.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hvdrecover import config
from hvdrecover.doctor import facts
from hvdrecover.surroundings import versions

if TYPE_CHECKING:
    from hvdrecover.doctor.probing import Probe

MARK = "hvdrecover-host:"
CONNECT = 3.0  # seconds for another host to take a connection
_LONGEST = 600.0  # seconds without a question after which the kernel ends a process on a host that is cut off
_AT_ONCE = 64  # connections


class Host:
    """This host; each public method answers one question."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0), backlog=1024)  # the kernel takes the connections
        self._probe: Probe | None = None

    def adopt(self, variables: dict[str, str]) -> None:
        """Take over the environment that a launcher would hand on."""
        config.adopt(variables)

    def facts(self) -> dict[str, Any]:
        """Return what there is on this host."""
        return asdict(facts.gather(self._listener.getsockname()[1]))

    def clock(self) -> float:
        """The time: seconds since the Unix epoch."""
        return time.time()

    def resolve(self, names: list[str]) -> dict[str, str | None]:
        """The IPv4 address that each name stands for here, or None."""
        return {name: _address(name) for name in names}

    def route(self, address: str) -> tuple[str, str]:
        """The interface, and its address, by which an address is reached."""
        return facts.route_to(address)

    def reach(self, peers: dict[str, tuple[str, int]]) -> dict[str, str]:
        """Return what is wrong with a connection to each peer's address and port; empty if nothing is."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return dict(zip(peers, pool.map(_problem, peers.values()), strict=True))

    def compute(self) -> list[dict[str, Any]]:
        """Return what came of matrix products on each processor, as far as something multiplies on it."""
        from hvdrecover.doctor import matrix_products

        found = matrix_products.run("cpus")
        return [*found, *matrix_products.run("gpus")] if facts.gpus() and versions()["torch"] else found

    def gpus(self) -> dict[str, Any] | None:
        """Return what is known of the health of GPUs."""
        from hvdrecover.doctor import gpus

        return gpus.look()

    def near(self, checkpoint: str | None) -> dict[str, Any] | None:
        """Return what near roots there are here, and how much room."""
        from hvdrecover.doctor import near

        return near.look(checkpoint)

    def root(self, url: str) -> dict[str, Any]:
        """Open a checkpoint root to try it out, and say what it holds and where it will be written to."""
        from hvdrecover.doctor.probing import Probe

        self._probe = Probe(url)
        return {**self._probe.look(), "path": self._probe.path}

    def write(self) -> dict[str, Any]:
        """Write to the root, and read it back."""
        assert self._probe is not None
        return self._probe.try_writing()

    def create(self) -> dict[str, Any]:
        """Create a file that others create, too."""
        assert self._probe is not None
        return self._probe.try_creating()

    def see(self, url: str, path: str) -> bool:
        """Return whether a file of a root is there for this host, too."""
        from hvdrecover.doctor.probing import sees

        return sees(url, path)

    def clean(self) -> None:
        """Remove what was made at the root."""
        probe, self._probe = self._probe, None
        if probe is not None:
            probe.close()


def _address(name: str) -> str | None:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return None


def _problem(peer: tuple[str, int]) -> str:
    try:
        socket.create_connection((peer[0], peer[1]), CONNECT).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _answered(host: Host, line: str) -> dict[str, Any]:
    question = json.loads(line)
    try:
        method: Callable[..., Any] = getattr(host, question["ask"])
        return {"answer": method(*question["about"])}
    except Exception as error:
        return {"error": str(error) or repr(error), "kind": type(error).__name__}


def main() -> None:
    """Answer until nobody asks any more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    host = Host()
    try:
        signal.setitimer(signal.ITIMER_REAL, _LONGEST)
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_REAL, _LONGEST)
            sys.stdout.write(f"{MARK}{json.dumps(_answered(host, line))}\n")
            sys.stdout.flush()
    finally:
        host.clean()


if __name__ == "__main__":
    main()
