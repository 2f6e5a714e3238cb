"""Stub guardians in one process: ``python -m benchmarks.guardians.stubs COUNT SECONDS FAULTS RESULT``.

The supervisor starts it as it starts a worker. It connects as many guardians would, has each of them report
its commit as real ones do, and measures what that costs the supervisor and how fast it reacts.
"""

from __future__ import annotations

import json
import os
import selectors
import sys
import time
from pathlib import Path

import psutil

from benchmarks.measure import cpu_time
from hvdrecover import config
from hvdrecover.launch import link, processes
from hvdrecover.launch.link import Link

_LAUNCHER = "hvdrecover.launch.horovodrun"  # which the supervisor starts
_EVERY = 5.0  # seconds between reports of each guardian
_PATIENCE = 60.0
_PAUSE = 0.2  # seconds between faults, so that each finds a supervisor at its usual work


def main(count: int, seconds: float, faults: int, result: Path) -> None:
    """Measure, and write down what was found."""
    processes.allow_open_files()
    launchers = [each for each in psutil.Process().parents() if _LAUNCHER in each.cmdline()[:3]]
    supervisor = launchers[-1].ppid()
    began = time.monotonic()
    stubs = Stubs(count)
    stubs.await_orders("know")
    found: dict[str, object] = {"coming": [time.monotonic() - began]}
    found["cpu"] = [_cpu(supervisor, stubs, seconds)]
    found["reaction"] = [stubs.react("stacks", stubs.stall) for _ in range(faults)]
    found["end"] = [stubs.react("stop", stubs.fail)]
    result.write_text(json.dumps(found))


class Stubs:
    """The guardians."""

    def __init__(self, count: int) -> None:
        address = config.read().supervisor
        assert address is not None
        self._selector = selectors.DefaultSelector()
        self._links: list[Link] = []
        self._reported = time.monotonic()
        for slot in range(count):
            new = link.connect(*address, name=f"host-{slot // 8}", slot=slot % 8, pid=os.getpid())
            self._links.append(new)
            self._selector.register(new, selectors.EVENT_READ, new)

    def await_orders(self, order: str) -> None:
        """Wait until all of them have been given an order."""
        waiting, deadline = set(self._links), time.monotonic() + _PATIENCE
        while waiting:
            for key, _ in self._selector.select(0.1):
                told = key.data.receive()
                if not key.data.is_open:
                    raise ConnectionError("the supervisor has dropped a guardian")
                if any(message.get("order") == order for message in told):
                    waiting.discard(key.data)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(waiting)} guardians wait for the order {order}")

    def train(self, seconds: float) -> None:
        """Report commits for a while, each guardian in its turn."""
        began, turn = time.monotonic(), 0
        while (now := time.monotonic()) < began + seconds:
            while turn < (now - began) * len(self._links) / _EVERY:
                self._links[turn % len(self._links)].send(kind="commit", commit=[1, turn], point=[turn, 0])
                turn += 1
            time.sleep(0.005)

    def react(self, order: str, tell: object) -> float:
        """Return the seconds from a word of one guardian until all have been given an order."""
        self.train(_PAUSE)
        began = time.monotonic()
        assert callable(tell)
        tell()
        self.await_orders(order)
        return time.monotonic() - began

    def stall(self) -> None:
        """Tell that a rank is waited for; the supervisor asks all where it is."""
        self._links[0].send(kind="stalled", ranks=[1])

    def fail(self) -> None:
        """Tell of a fault that ends this start of the job."""
        self._links[-1].send(
            kind="fault",
            fault="hang",
            message="the last rank hangs",
            exit=-9,
            detail="SIGKILL",
            commit=[1, 1],
            point=[1, 0],
            end="apart",
            final=True,
            unprinted=False,
        )


def _cpu(supervisor: int, stubs: Stubs, seconds: float) -> float:
    """The processor time that the supervisor uses, in seconds per second."""
    before, began = cpu_time(supervisor), time.monotonic()
    stubs.train(seconds)
    return (cpu_time(supervisor) - before) / (time.monotonic() - began)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
