"""Horovod's driver, as our edits have it wait for workers: none is forgotten, and none counts twice."""

from __future__ import annotations

import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer

SLOTS = 2
REMOVED = -1  # the rank of who has no place
HANGS = 20.0  # seconds, far more than anything here takes
GONE = 410


class Call(threading.Thread):
    """A call in a thread: of a worker that asks the driver, or its server, and waits for the answer."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._call = lambda: function(*arguments)
        self.result: Any = None
        self.start()

    def run(self) -> None:
        self.result = self._call()

    def answered(self, within: float = HANGS) -> bool:
        self.join(within)
        return not self.is_alive()


def _rank(driver: ElasticDriver, slot: int) -> int:
    driver.record_ready("localhost", slot)
    return int(driver.get_slot_info("localhost", slot).rank)


def _address(url: str) -> bytes | int:
    try:
        with urllib.request.urlopen(url, timeout=2 * HANGS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        return error.code


def ask(driver: ElasticDriver, slot: int) -> Call:
    """Ask the driver for a worker's place, as a rank."""
    return Call(_rank, driver, slot)


def asking(url: str) -> Call:
    """Ask the driver's server for a rank's address, as Gloo does; the result may be an HTTP status."""
    return Call(_address, url)


def send(address: str) -> None:
    """Tell the server a rank's address, which is that of where it stands there."""
    request = urllib.request.Request(address, data=address.encode(), method="PUT")
    with urllib.request.urlopen(request, timeout=HANGS):
        pass


class Workers:
    """The workers that the driver has started: each "process" runs until it is told its exit code."""

    def __init__(self) -> None:
        self._ended = [threading.Event() for _ in range(SLOTS)]
        self._codes = [0] * SLOTS

    def create(self, slot: Any, events: Any) -> tuple[int, float]:
        self._ended[slot.local_rank].wait()
        return self._codes[slot.local_rank], time.time()

    def end(self, slot: int, code: int) -> None:
        self._codes[slot] = code
        self._ended[slot].set()


@pytest.fixture
def workers() -> Workers:
    return Workers()


@pytest.fixture
def driver(workers: Workers) -> Iterator[ElasticDriver]:
    server = RendezvousServer()
    driver = ElasticDriver(server, FixedHosts({"localhost": SLOTS}), SLOTS, SLOTS, timeout=HANGS)
    server.start(create_rendezvous_handler(driver))
    driver.start(SLOTS, workers.create)
    yield driver
    if not driver.finished():
        driver.stop()


@pytest.fixture
def server(driver: ElasticDriver) -> str:
    return f"http://127.0.0.1:{driver._rendezvous._httpd.server_port}"


def test_a_worker_that_is_restarted_while_it_waits_counts_once(driver: ElasticDriver) -> None:
    lost = ask(driver, 0)
    assert not lost.answered(0.05)
    restarted = ask(driver, 0)
    assert lost.answered()
    assert not restarted.answered(0.05)
    other = ask(driver, 1)
    assert restarted.answered() and other.answered()


def test_workers_connect_however_often_some_are_restarted_while_they_wait(driver: ElasticDriver) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads come between each other anywhere
    try:
        counts = [0] * SLOTS
        over = threading.Event()
        slots = [Call(_live, driver, slot, counts, over) for slot in range(SLOTS)]
        seen, deadline = 0, time.monotonic() + HANGS
        while min(counts) < 300:
            if sum(counts) > seen:
                seen, deadline = sum(counts), time.monotonic() + HANGS
            assert time.monotonic() < deadline, f"after {counts} rendezvouses the workers wait for ever"
            time.sleep(0.01)
        over.set()
        for each in slots:
            each.join(HANGS)
    finally:
        sys.setswitchinterval(interval)


def _live(driver: ElasticDriver, slot: int, counts: list[int], over: threading.Event) -> None:
    """A slot whose worker has one rendezvous after another, and is often killed while it waits for one."""
    dice = random.Random(slot)
    place = None
    while not over.is_set():
        if place is None or dice.random() < 0.5:
            place = ask(driver, slot)  # the worker before, if it still waits, is dead
        if place.answered(dice.choice([0.0, 0.0, 0.0005, 0.002])):
            counts[slot] += 1
            place = None


def test_one_that_fails_while_it_waits_is_given_up_when_the_others_have_asked(
    driver: ElasticDriver, workers: Workers
) -> None:
    lost = ask(driver, 0)
    assert not lost.answered(0.05)
    workers.end(0, 1)
    assert lost.answered()
    assert not driver.finished()
    assert ask(driver, 1).answered()
    assert driver.finished()  # no other host is left
    workers.end(1, 1)  # whose host is given up by now, so it doesn't count
    results = driver.get_results().worker_results
    assert {name: code for name, (code, _) in results.items()} == {"localhost[0]": 1}


def test_who_has_no_place_is_told_so_at_once_and_does_not_count(driver: ElasticDriver) -> None:
    dropped = ask(driver, SLOTS)
    assert dropped.answered() and dropped.result == REMOVED
    first = ask(driver, 0)
    assert not first.answered(0.05)
    assert ask(driver, 1).answered() and first.answered()


# -- addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["global", "local_localhost"])
def test_no_address_is_given_before_all_have_told_theirs(
    driver: ElasticDriver, server: str, scope: str
) -> None:
    send(f"{server}/{scope}/0")
    send(f"{server}/{scope}/rank_1")
    calls = [asking(f"{server}/{scope}/{rank}") for rank in range(SLOTS)]
    assert not any(each.answered(0.1) for each in calls)
    send(f"{server}/{scope}/1")
    assert all(each.answered() for each in calls)
    assert [each.result for each in calls] == [f"{server}/{scope}/{rank}".encode() for rank in range(SLOTS)]


@pytest.mark.parametrize("event", ["another is lost", "the job ends"])
def test_a_waiting_rank_is_told_that_the_round_is_over(
    driver: ElasticDriver, server: str, workers: Workers, event: str
) -> None:
    call = asking(f"{server}/global/1")
    assert not call.answered(0.1)
    if event == "another is lost":
        workers.end(1, 1)
    else:
        driver.stop()
    assert call.answered() and call.result == GONE


def test_who_waits_is_told_that_another_has_come_anew_and_all_are_in_the_next_round(
    driver: ElasticDriver, server: str
) -> None:
    send(f"{server}/global/0")
    call = asking(f"{server}/global/1")
    assert not call.answered(0.1)
    restarted = ask(driver, 1)
    assert call.answered() and call.result == GONE
    assert ask(driver, 0).answered() and restarted.answered()
    call = asking(f"{server}/global/1")
    assert not call.answered(0.1)  # rank 0's address was that of the round before
    send(f"{server}/global/0")
    send(f"{server}/global/1")
    assert call.answered() and call.result == f"{server}/global/1".encode()
