"""Horovod's driver starts workers on a host that was lost and comes back while the job waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from horovod.runner.elastic import discovery
from horovod.runner.elastic import driver as horovods
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer

from hvdrecover.launch.run_horovodrun import start_anew

HANGS = 20.0  # seconds, far more than anything here takes
COOLDOWN = (600, 600)  # seconds, which pass when the test says so


class Workers:
    """The driver's starts: each "process" runs until it is ended."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended = {name: threading.Event() for name in ("one", "two")}
        self.changed = threading.Condition()

    def create(self, slot: Any, events: Any) -> tuple[int, float]:
        with self.changed:
            self.started.append(slot.hostname)
            self.changed.notify_all()
        self.ended[slot.hostname].wait()
        return 1, 0.0

    def wait_for(self, *hosts: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: sorted(self.started) == sorted(hosts), HANGS), self.started


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The time of cooldowns."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(discovery, "time", SimpleNamespace(time=lambda: clock.now))
    monkeypatch.setattr(horovods, "DISCOVER_HOSTS_FREQUENCY_SECS", 0.01)
    return clock


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def driver(clock: SimpleNamespace, workers: Workers) -> Iterator[Any]:
    class Driver(horovods.ElasticDriver):  # type: ignore[misc]
        pass

    start_anew(Driver)
    server = RendezvousServer()
    made = Driver(server, FixedHosts({"one": 1, "two": 1}), 2, 2, timeout=HANGS, cooldown_range=COOLDOWN)
    server.start(create_rendezvous_handler(made))
    made.start(2, workers.create)
    yield made
    made.stop()


def test_a_lost_host_that_comes_back_is_started_again(
    driver: Any, workers: Workers, clock: SimpleNamespace
) -> None:
    workers.wait_for("one", "two")
    for lost in range(1, 3):
        survivor = threading.Thread(target=driver.record_ready, args=("one", 0), daemon=True)
        survivor.start()
        ended, workers.ended["two"] = workers.ended["two"], threading.Event()
        ended.set()
        give_up = time.monotonic() + HANGS
        while not driver._host_manager.is_blacklisted("two"):
            assert time.monotonic() < give_up
        clock.now += 601.0
        workers.wait_for("one", *["two"] * (1 + lost))
        survivor.join(HANGS)
        assert not survivor.is_alive()
        assert driver.world_size() == 2
