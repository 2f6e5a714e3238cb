"""Horovod's driver, as our edits have it wait for workers: none is forgotten, and none counts twice."""

from __future__ import annotations

import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from horovod.runner.elastic.discovery import FixedHosts
from horovod.runner.elastic.driver import ElasticDriver
from horovod.runner.elastic.rendezvous import create_rendezvous_handler
from horovod.runner.http.http_server import RendezvousServer

SLOTS = 2
REMOVED = -1  # the rank of who has no place
HANGS = 20.0  # seconds, far more than anything here takes
NOT_FOUND, GONE = 404, 410


class Request(threading.Thread):
    """The question of a worker to the driver, for its place, and the wait for the answer."""

    def __init__(self, driver: ElasticDriver, slot: int) -> None:
        super().__init__(daemon=True)
        self._driver, self._slot = driver, slot
        self.rank: int | None = None
        self.start()

    def run(self) -> None:
        self._driver.record_ready("localhost", self._slot)
        self.rank = self._driver.get_slot_info("localhost", self._slot).rank

    def answered(self, within: float = HANGS) -> bool:
        self.join(within)
        return not self.is_alive()


class Asking(threading.Thread):
    """A rank that asks the driver's server for another's address, as Gloo does."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self._address = address
        self._answer: bytes | int | None = None
        self.start()

    def run(self) -> None:
        try:
            with urllib.request.urlopen(self._address, timeout=2 * HANGS) as answer:
                self._answer = answer.read()
        except urllib.error.HTTPError as error:
            self._answer = error.code

    def answer(self, within: float = HANGS) -> bytes | int | None:
        """The address, or an HTTP status; None as long as there is no answer."""
        self.join(within)
        return self._answer


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


def test_all_are_answered_when_all_have_asked(driver: ElasticDriver) -> None:
    for _ in range(3):
        first = Request(driver, 0)
        assert not first.answered(0.05)
        second = Request(driver, 1)
        assert first.answered() and second.answered()
        assert (first.rank, second.rank) == (0, 1)


def test_a_worker_that_is_restarted_while_it_waits_counts_once(driver: ElasticDriver) -> None:
    lost = Request(driver, 0)
    assert not lost.answered(0.05)
    restarted = Request(driver, 0)
    assert lost.answered()
    assert not restarted.answered(0.05)
    other = Request(driver, 1)
    assert restarted.answered() and other.answered()


def test_workers_connect_however_often_some_are_restarted_while_they_wait(driver: ElasticDriver) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads come between each other anywhere
    try:
        counts = [0] * SLOTS
        over = threading.Event()
        slots = [
            threading.Thread(target=_live, args=(driver, slot, counts, over), daemon=True)
            for slot in range(SLOTS)
        ]
        for each in slots:
            each.start()
        _wait_for_rendezvous(counts, 300)
        over.set()
        for each in slots:
            each.join(HANGS)
    finally:
        sys.setswitchinterval(interval)


def _live(driver: ElasticDriver, slot: int, counts: list[int], over: threading.Event) -> None:
    """A slot whose worker has one rendezvous after another, and is often killed while it waits for one."""
    dice = random.Random(slot)
    request = None
    while not over.is_set():
        if request is None or dice.random() < 0.5:
            request = Request(driver, slot)  # the worker before, if it still waits, is dead
        if request.answered(dice.choice([0.0, 0.0, 0.0005, 0.002])):
            counts[slot] += 1
            request = None


def _wait_for_rendezvous(counts: list[int], times: int) -> None:
    seen, deadline = 0, time.monotonic() + HANGS
    while min(counts) < times:
        if sum(counts) > seen:
            seen, deadline = sum(counts), time.monotonic() + HANGS
        assert time.monotonic() < deadline, f"after {counts} rendezvouses the workers wait for ever"
        time.sleep(0.01)


def test_one_that_fails_while_it_waits_is_given_up_when_the_others_have_asked(
    driver: ElasticDriver, workers: Workers
) -> None:
    lost = Request(driver, 0)
    assert not lost.answered(0.05)
    workers.end(0, 1)
    assert lost.answered()
    assert not driver.finished()
    assert Request(driver, 1).answered()
    assert driver.finished()  # no other host is left
    workers.end(1, 1)  # whose host is given up by now, so it doesn't count
    results = driver.get_results().worker_results
    assert {name: code for name, (code, _) in results.items()} == {"localhost[0]": 1}


def test_who_has_no_place_is_told_so_at_once_and_does_not_count(driver: ElasticDriver) -> None:
    dropped = Request(driver, SLOTS)
    assert dropped.answered() and dropped.rank == REMOVED
    first = Request(driver, 0)
    assert not first.answered(0.05)
    assert Request(driver, 1).answered() and first.answered()


# -- addresses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["global", "local_localhost"])
def test_no_address_is_given_before_all_have_told_theirs(
    driver: ElasticDriver, server: str, scope: str
) -> None:
    send(f"{server}/{scope}/0")
    send(f"{server}/{scope}/rank_1")
    asking = [Asking(f"{server}/{scope}/{rank}") for rank in range(SLOTS)]
    assert [each.answer(0.1) for each in asking] == [None] * SLOTS
    send(f"{server}/{scope}/1")
    assert [each.answer() for each in asking] == [
        f"{server}/{scope}/{rank}".encode() for rank in range(SLOTS)
    ]


def test_who_waits_is_told_that_another_was_lost(
    driver: ElasticDriver, server: str, workers: Workers
) -> None:
    asking = Asking(f"{server}/global/1")
    assert asking.answer(0.1) is None
    workers.end(1, 1)
    assert asking.answer() == GONE
    assert Asking(f"{server}/global/1").answer() == GONE


def test_who_waits_is_told_that_another_has_come_anew_and_all_are_in_the_next_round(
    driver: ElasticDriver, server: str
) -> None:
    send(f"{server}/global/0")
    asking = Asking(f"{server}/global/1")
    assert asking.answer(0.1) is None
    restarted = Request(driver, 1)
    assert asking.answer() == GONE
    assert Request(driver, 0).answered() and restarted.answered()
    asking = Asking(f"{server}/global/1")
    assert asking.answer(0.1) is None  # rank 0's address was that of the round before
    send(f"{server}/global/0")
    send(f"{server}/global/1")
    assert asking.answer() == f"{server}/global/1".encode()


def test_nobody_waits_any_longer_when_the_job_ends(driver: ElasticDriver, server: str) -> None:
    asking = Asking(f"{server}/global/1")
    assert asking.answer(0.1) is None
    driver.stop()
    assert asking.answer() == GONE
