"""Our changes to Horovod's driver, with the real one."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from horovod.runner.elastic import discovery
from horovod.runner.elastic import driver as horovods
from horovod.runner.elastic.discovery import FixedHosts, HostDiscoveryScript
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer

from hvdrecover.launch.run_horovodrun import ask_by_shell, start_anew
from tests.unit.launch.children import environment

# Horovod's own function that runs a worker, after what our driver has set up.
CODE = """
from types import SimpleNamespace
from hvdrecover.launch import run_horovodrun
run_horovodrun._leave_to_guardians()
from horovod.runner.gloo_run import _exec_command_fn
settings = SimpleNamespace(elastic=True, verbose=0, output_filename=None, prefix_output_with_timestamp=False)
slot = SimpleNamespace(rank=1, hostname="localhost")
print([_exec_command_fn(settings)(f"exit {code}", slot, None)[0] for code in (3, 129, 255)])
"""


def test_horovod_says_of_a_worker_only_what_its_guardian_cannot() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "Process 1 exit with status code 255.\n[3, 129, 255]\n", done.stderr


# -- host discovery: Horovod's driver asks the script without a process in between --------------------


class Script(HostDiscoveryScript):
    """Horovod's class, as the launcher changes it."""


ask_by_shell(Script)


def test_its_answer_is_read_by_horovod() -> None:
    hosts = Script("printf 'one:2\\ntwo\\n'", 4).find_available_hosts_and_slots()
    assert list(hosts.items()) == [("one", 2), ("two", 4)]


def test_one_that_fails_gives_no_answer() -> None:
    with pytest.raises(RuntimeError, match=r"`echo one; exit 3` .* exit code 3"):
        Script("echo one; exit 3", 1).find_available_hosts_and_slots()


@pytest.mark.parametrize("name", ["h1;touch${IFS}pwned", "$(touch)", "-oProxyCommand=touch", "a&b", "u@h"])
def test_a_name_that_a_shell_would_run_is_no_answer(name: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(f"'{name}'")):
        Script(f"printf 'one:2\n%s:1\n' {shlex.quote(name)}", 1).find_available_hosts_and_slots()


# -- a host that was lost comes back while the job waits for it ---------------------------------------

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
