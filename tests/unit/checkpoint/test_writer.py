import gc
import logging
import re
import threading
import weakref

import pytest

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.storage import ATTEMPTS
from hvdrecover.checkpoint.store import BackgroundWriter, load_newest
from hvdrecover.errors import FencedError, HvdrecoverError, StorageError
from tests.fakes.clock import SharedClock
from tests.unit.checkpoint.roots import Wrapped, assert_is, content, make_snapshot, make_store

TIMEOUT = 30  # seconds; never reached unless something is broken


@pytest.fixture
def clock():
    return SharedClock()


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


@pytest.fixture
def writer(store):
    writer = BackgroundWriter(store, rank=0)
    yield writer
    writer.stop()


def begin_outage(writer, wrapped, clock, commit=2):
    """A commit that can't be written, and a writer that pauses for as long as the test likes."""
    clock.pauses = 0
    wrapped.plan = [StorageError("url", "the storage is away.") for _ in range(1000)]
    snapshot = make_snapshot(1, commit)
    assert writer.submit(snapshot)
    assert clock.in_pause.wait(TIMEOUT)
    return snapshot


def test_an_outage_is_one_line_when_it_begins_and_one_when_it_ends(store, wrapped, clock, writer):
    writer.submit(make_snapshot(1, 2))
    writer.wait()
    clock.advance(42)
    begin_outage(writer, wrapped, clock, commit=3)
    for _ in range(5):  # the pause ends, and the next attempt fails
        clock.in_pause.clear()
        clock.advance(60)
        assert clock.in_pause.wait(TIMEOUT)
    wrapped.plan.clear()
    writer.hurry()
    writer.wait()
    loud = [facts["message"] for _, facts in store.events.noted if facts["level"] >= logging.INFO]
    (begins,), (over,) = store.events.of("outage"), store.events.of("outage_over")
    begins, ends = begins["message"], over["message"]
    assert [line for line in loud if line] == [begins, ends]
    assert "commit 3 could not be written: url: the storage is away. Training continues" in begins
    assert begins.endswith("the last durable commit, 2, is 42 s old")
    assert ends.endswith("works again after 300 s; g0001-c00000003 is durable")
    assert (over["attempts"], over["seconds"]) == (6, 300.0)
    assert len(store.events.of("write_failed")) == 6


def test_in_a_pause_a_newer_commit_takes_the_place_of_the_one_that_waits(store, wrapped, clock, writer):
    old = begin_outage(writer, wrapped, clock)
    newer = make_snapshot(1, 9)
    assert writer.in_flight is old
    assert writer.submit(newer)
    assert writer.in_flight is newer
    wrapped.plan.clear()
    writer.hurry()
    writer.wait()
    assert writer.last_durable == CommitId(1, 9)
    assert f"{CommitId(1, 2)}/MANIFEST.json" not in content(wrapped.inner)
    assert_is(load_newest(store), newer)


def test_the_wait_ends_with_the_reasons_and_the_writer_continues(store, wrapped, clock, writer):
    begin_outage(writer, wrapped, clock)
    tried = len(store.events.of("write_failed"))
    clock.pauses = ATTEMPTS - 1
    writer.hurry()
    with pytest.raises(StorageError) as caught:
        writer.wait()
    assert len(store.events.of("write_failed")) == tried + ATTEMPTS
    message = str(caught.value)
    assert re.match(rf"{store.url}: .*: url: the storage is away\. .*: 6;", message)
    assert "the storage is away" in str(caught.value.__cause__)
    assert_is(load_newest(make_store(wrapped.inner)), make_snapshot(1, 1))
    assert clock.in_pause.wait(TIMEOUT)
    wrapped.plan.clear()
    clock.advance(60)
    writer.hurry()
    writer.wait()
    assert writer.last_durable == CommitId(1, 2)


def test_stop_ends_a_pause_and_the_retries(store, wrapped, clock, writer):
    begin_outage(writer, wrapped, clock)
    writer.stop()
    with pytest.raises(StorageError):
        writer.wait()
    assert writer.in_flight is None
    assert len(store.events.of("write_failed")) == 1
    with pytest.raises(RuntimeError, match="stopped"):
        writer.submit(make_snapshot(1, 3))


def test_being_fenced_is_final(store, wrapped, clock, writer):
    make_store(wrapped.inner, job="new").claim_next()
    writer.submit(make_snapshot(1, 2))
    for _ in range(2):
        with pytest.raises(FencedError):
            writer.wait()
    assert clock.waits == []
    assert isinstance(writer.failure, FencedError)
    assert [facts["level"] for facts in store.events.of("write_failed")] == [logging.ERROR]
    assert store.events.of("outage") == []
    assert not writer.submit(make_snapshot(1, 3))
    assert_is(load_newest(store), make_snapshot(1, 1))


@pytest.fixture
def no_collector():
    """Only references count, so what is let go is let go at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def deep_error(buffer, depth=3):
    """Fail as storages do: somewhere below, in frames that hold the bytes, as another error's cause."""
    try:
        if depth:
            deep_error(buffer, depth - 1)
        raise OSError("no route to host")
    except OSError as error:
        raise StorageError("url", "could not write") from error


@pytest.mark.parametrize("ends", ["replaced", "fenced", "stopped"])
def test_a_snapshot_is_let_go_when_its_write_has_failed(
    store, wrapped, clock, writer, ends, no_collector, monkeypatch
):
    clock.pauses = 0
    monkeypatch.setattr(wrapped, "write", lambda path, buffer: deep_error(buffer))
    snapshot, gone = make_snapshot(1, 2), threading.Event()
    for arena in snapshot.arenas.values():
        weakref.finalize(arena.buffer, gone.set)
    writer.submit(snapshot)
    del snapshot, arena
    assert clock.in_pause.wait(TIMEOUT)
    with pytest.raises(HvdrecoverError):
        clock.pauses = 1
        writer.hurry(2)
        writer.wait()
    assert not gone.is_set()
    if ends == "replaced":
        assert clock.in_pause.wait(TIMEOUT)
        assert writer.submit(make_snapshot(1, 3))
    elif ends == "fenced":
        make_store(wrapped.inner, job="new").claim_next()
        writer.hurry()
    else:
        writer.stop()
    assert gone.wait(TIMEOUT)
