import threading

import pytest

from hvdrecover.checkpoint import writer as writers
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.policy import retry_delay
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.writer import ATTEMPTS, BackgroundWriter
from hvdrecover.errors import FencedError, FlushTimeoutError, StorageError
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import Gate, Wrapped, assert_is, make_snapshot, make_store

TIMEOUT = 30  # seconds; never reached unless something is broken


def away():
    return StorageError("url", "the storage is away")


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def wrapped(root):
    return Wrapped(root)


@pytest.fixture
def store(wrapped, clock):
    """A root with one commit."""
    store = make_store(wrapped, clock=clock)
    store.claim_next()
    store.write(make_snapshot(1, 1), rank=0)
    return store


def test_a_commit_becomes_durable(store):
    writer = BackgroundWriter(store, rank=0)
    assert (writer.last_durable, writer.in_flight) == (None, None)
    snapshot = make_snapshot(1, 2)
    writer.submit(snapshot)
    writer.wait(TIMEOUT)
    assert (writer.last_durable, writer.in_flight) == (CommitId(1, 2), None)
    assert_is(load_newest(store), snapshot)


def test_success_is_an_event_with_its_facts(store):
    writer = BackgroundWriter(store, rank=0)
    snapshot = make_snapshot(1, 2)
    writer.submit(snapshot)
    writer.wait(TIMEOUT)
    (facts,) = store.events.of("durable")
    assert (facts["generation"], facts["commit"], facts["seconds"]) == (1, 2, 0.0)
    assert facts["bytes"] == snapshot.nbytes == sum(len(arena.buffer) for arena in snapshot.arenas.values())
    assert store.events.of("write_failed") == []


@pytest.mark.parametrize("failures", range(1, ATTEMPTS))
def test_a_storage_that_comes_back_is_retried_with_back_off(store, wrapped, clock, failures):
    wrapped.plan = [away() for _ in range(failures)]
    writer = BackgroundWriter(store, rank=0)
    writer.submit(make_snapshot(1, 2))
    writer.wait(TIMEOUT)
    assert writer.last_durable == CommitId(1, 2)
    assert clock.waits == [retry_delay(attempt) for attempt in range(1, failures + 1)]
    assert [facts["attempt"] for facts in store.events.of("write_failed")] == list(range(1, failures + 1))
    assert "the storage is away" in store.events.of("write_failed")[0]["error"]
    assert_is(load_newest(store), make_snapshot(1, 2))


@pytest.mark.parametrize("call", range(4))
def test_a_failure_at_any_call_is_made_up_for(store, wrapped, call):
    wrapped.plan = [None] * call + [away()]
    writer = BackgroundWriter(store, rank=0)
    writer.submit(make_snapshot(1, 2))
    writer.wait(TIMEOUT)
    assert len(store.events.of("write_failed")) == 1
    assert_is(load_newest(make_store(wrapped.inner)), make_snapshot(1, 2))


def test_a_storage_that_stays_away_is_given_up_and_wait_says_so(store, wrapped, clock):
    wrapped.plan = [away() for _ in range(ATTEMPTS)]
    writer = BackgroundWriter(store, rank=0)
    writer.submit(make_snapshot(1, 2))
    with pytest.raises(StorageError, match="the storage is away"):
        writer.wait(TIMEOUT)
    assert (writer.last_durable, writer.in_flight) == (None, None)
    assert len(clock.waits) == ATTEMPTS - 1
    assert_is(load_newest(store), make_snapshot(1, 1))


def test_the_failure_stands_until_the_next_commit_makes_up_for_it(store, wrapped):
    wrapped.plan = [away() for _ in range(ATTEMPTS)]
    writer = BackgroundWriter(store, rank=0)
    writer.submit(make_snapshot(1, 2))
    for _ in range(2):
        with pytest.raises(StorageError):
            writer.wait(TIMEOUT)
    writer.submit(make_snapshot(1, 3))
    writer.wait(TIMEOUT)
    assert writer.last_durable == CommitId(1, 3)
    assert_is(load_newest(store), make_snapshot(1, 3))


def test_an_unforeseen_error_is_a_storage_error_with_its_cause(store, wrapped):
    wrapped.plan = [ZeroDivisionError("odd") for _ in range(ATTEMPTS)]
    writer = BackgroundWriter(store, rank=0)
    writer.submit(make_snapshot(1, 2))
    with pytest.raises(
        StorageError, match=r"writing g0001-c00000002 failed: ZeroDivisionError\('odd'\)"
    ) as caught:
        writer.wait(TIMEOUT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_being_fenced_is_final_and_raised_at_the_next_submit(store, wrapped, clock):
    writer = BackgroundWriter(store, rank=0)
    make_store(wrapped.inner, job="new").claim_next()
    writer.submit(make_snapshot(1, 2))
    with pytest.raises(FencedError):
        writer.wait(TIMEOUT)
    assert clock.waits == []
    assert len(store.events.of("write_failed")) == 1
    for _ in range(2):
        with pytest.raises(FencedError):
            writer.submit(make_snapshot(1, 3))
    assert_is(load_newest(store), make_snapshot(1, 1))


@pytest.fixture
def gated(root, clock):
    """A writer whose first write waits at a gate."""
    gate = Gate(root)
    writer = BackgroundWriter(make_store(gate, clock=clock), rank=0)
    snapshot = make_snapshot(1, 1)
    writer.submit(snapshot)
    assert gate.reached.wait(TIMEOUT)
    yield writer, snapshot, gate
    gate.open.set()
    writer.wait(TIMEOUT)


def test_a_wait_that_is_too_short_says_so_and_the_write_goes_on(gated):
    writer, snapshot, gate = gated
    with pytest.raises(
        FlushTimeoutError, match="g0001-c00000001 is not durable after 0 s; the write goes on"
    ):
        writer.wait(0)
    assert writer.in_flight is snapshot
    gate.open.set()
    writer.wait(TIMEOUT)
    assert (writer.last_durable, writer.in_flight) == (snapshot.id, None)


def test_one_commit_is_written_at_a_time(gated):
    writer, snapshot, gate = gated
    with pytest.raises(RuntimeError, match="in flight"):
        writer.submit(make_snapshot(1, 2))
    assert writer.in_flight is snapshot
    gate.open.set()
    writer.wait(TIMEOUT)
    writer.submit(make_snapshot(1, 2))
    writer.wait(TIMEOUT)
    assert writer.last_durable == CommitId(1, 2)


def test_submit_does_not_wait_for_the_write(gated):
    writer, snapshot, _ = gated
    assert writer.in_flight is snapshot
    assert writer.last_durable is None


def test_stop_gives_up_retries(store, wrapped, clock):
    wrapped.plan = [away() for _ in range(ATTEMPTS)]
    writer = BackgroundWriter(store, rank=0)
    writer.stop()
    writer.submit(make_snapshot(1, 2))
    with pytest.raises(StorageError):
        writer.wait(TIMEOUT)
    assert len(store.events.of("write_failed")) == 1


def test_waiting_for_nothing_returns_at_once(store):
    BackgroundWriter(store, rank=0).wait(0)


def test_a_machine_without_another_thread_is_a_failed_write_and_not_a_hang(store, monkeypatch):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    writer = BackgroundWriter(store, rank=0)
    with monkeypatch.context() as patched:
        patched.setattr(writers.threading, "Thread", NoThread)
        writer.submit(make_snapshot(1, 2))
    with pytest.raises(StorageError, match="can't start new thread"):
        writer.wait(0)
    writer.submit(make_snapshot(1, 3))
    writer.wait(TIMEOUT)
    assert writer.last_durable == CommitId(1, 3)
