"""A commit that is being read is not deleted, in whatever order readers and deletions make their steps."""

import collections

import pytest

from hvdrecover.checkpoint import leases
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.pruning import delete_unless_read
from hvdrecover.checkpoint.reader import load_newest, read_commit, read_newest
from hvdrecover.checkpoint.root import READERS, commits, is_complete
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.errors import CorruptCheckpointError, IncompleteCommitError, StorageError
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import (
    Killed,
    Wrapped,
    assert_is,
    content,
    make_snapshot,
    make_store,
    memory_root,
)
from tests.unit.checkpoint.turns import Thread, every_order

OLD, NEW = CommitId(1, 1), CommitId(1, 2)


def write(storage, *numbers, keep=9, clock=None):
    store = make_store(storage, keep=keep, clock=clock)
    for number in numbers:
        snapshot = make_snapshot(1, number)
        del snapshot.arenas["optimizer"]  # one file is enough
        store.write(snapshot, rank=0)
    return store


def names(root):
    return root.names(READERS)


def expected(number):
    snapshot = make_snapshot(1, number)
    del snapshot.arenas["optimizer"]
    return snapshot


# -- one reader, one lease -----------------------------------------------------------------------------


def test_a_lease_is_there_before_the_manifest_is_read_and_gone_at_the_end(root):
    write(root, 1)
    seen = []

    class Watched(Wrapped):
        def __init__(self, inner):
            super().__init__(inner)
            self.size = lambda path: self.look("size", path) or inner.size(path)
            self.read = lambda path: self.look("read", path) or inner.read(path)
            self.read_into = lambda path, *args: self.look("read_into", path) or inner.read_into(path, *args)

        def look(self, verb, path):
            seen.append((verb, path.split("/")[-1], len(names(root))))

    assert_is(read_commit(Watched(root), OLD, clock=FakeClock()), expected(1))
    assert [step for step in seen if step[0] != "size"] == [
        ("read", "MANIFEST.json", 1),
        ("read_into", "model.safetensors", 1),
    ]
    assert {leased for _, _, leased in seen} == {1}
    assert names(root) == []


def test_a_lease_is_given_back_when_reading_fails(root):
    write(root, 1)
    root.publish("g0001-c00000001/model.safetensors", b"")
    with pytest.raises(CorruptCheckpointError):
        read_commit(root, OLD)
    assert names(root) == []


def test_a_lease_names_its_commit_and_expires(root):
    clock = FakeClock(start=1000.0)
    with leases.reading(root, OLD, clock):
        (name,) = names(root)
        assert name.startswith(f"g0001-c00000001-{int(1000 + 2 * leases.SPARE)}-")
        end = 1000 + 2 * leases.SPARE + leases.SKEW
        assert leases.is_read(root, OLD, end - 1)
        assert not leases.is_read(root, OLD, end)
        assert not leases.is_read(root, NEW, 1000.0)
    assert not leases.is_read(root, OLD, 1000.0)


def test_a_lease_lasts_as_long_as_the_slowest_reader_that_is_waited_for(root):
    clock = FakeClock(start=1000.0)
    nbytes = 100 << 30
    with leases.reading(root, OLD, clock) as lease:
        lease.last(nbytes)
        assert len(names(root)) == 1
        clock.advance(nbytes / leases.SLOWEST)
        assert leases.is_read(root, OLD, clock.now() + leases.SPARE)


def test_a_lease_is_renewed_while_reading_continues_and_is_never_absent(root):
    clock, counts = FakeClock(), []

    class Watched(Wrapped):
        def _mutate(self, verb, path, *args):
            super()._mutate(verb, path, *args)
            counts.append(len(names(root)))

    wrapped = Watched(root)
    with leases.reading(wrapped, OLD, clock) as lease:
        for _ in range(50):
            assert leases.is_read(root, OLD, clock.now() - leases.SKEW)
            clock.advance(leases.SPARE / 2)
            lease.last()
    assert set(counts[:-1]) == {1, 2}
    assert names(root) == []
    assert len(wrapped.calls) < 60  # it is not renewed each time that it is asked for


def test_a_root_that_cannot_be_written_is_read_without_a_lease(root):
    write(root, 1)
    wrapped = Wrapped(root)
    wrapped.plan = [StorageError("url", "read-only")] * 9
    assert_is(read_commit(wrapped, OLD), expected(1))
    assert wrapped.calls[0].startswith("publish readers/")


def test_a_lease_that_cannot_be_given_back_is_no_failure_and_expires(root):
    write(root, 1)
    wrapped = Wrapped(root)
    wrapped.plan = [None, StorageError("url", "read-only")]
    clock = FakeClock()
    assert_is(read_commit(wrapped, OLD, clock=clock), expected(1))
    assert leases.is_read(root, OLD, clock.now())
    leases.collect(root, clock.now() + 86400)
    assert names(root) == []


def test_other_files_among_the_leases_are_nobodys(root):
    for name in ("notes", "g0001-c00000001-99999999999.json", "g1-c1-99999999999-" + "0" * 32 + ".json"):
        root.publish(f"{READERS}/{name}", b"")
    assert not leases.is_read(root, OLD, 0.0)
    leases.collect(root, 1e12)
    assert len(names(root)) == 3


# -- deleting ------------------------------------------------------------------------------------------


def test_a_commit_that_is_being_read_is_deleted_when_the_reader_is_done(root):
    store = write(root, 1, 2, keep=2)
    with leases.reading(root, OLD, store.clock):
        store.write(make_snapshot(1, 3), rank=0)
        assert commits(root) == [CommitId(1, 3), NEW, OLD]
        assert_is(read_commit(root, OLD), expected(1))
        assert store.events.of("not_deleted") == []
    store.write(make_snapshot(1, 4), rank=0)
    assert commits(root) == [CommitId(1, 4), CommitId(1, 3)]


def test_a_commit_that_is_known_to_be_read_is_not_touched(root):
    write(root, 1)
    wrapped = Wrapped(root)
    with leases.reading(root, OLD, FakeClock()):
        assert not delete_unless_read(wrapped, OLD, FakeClock())
    assert wrapped.calls == []


def test_a_lease_of_a_killed_reader_holds_a_commit_until_it_expires_and_is_collected(root):
    clock = FakeClock()
    store = write(root, 1, 2, keep=1, clock=clock)
    wrapped = Wrapped(root)
    wrapped.kill_at = 1
    with pytest.raises(Killed):
        read_commit(wrapped, NEW, clock=clock)
    store.write(make_snapshot(1, 3), rank=0)
    assert commits(root) == [CommitId(1, 3), NEW]
    clock.advance(2 * leases.SPARE + leases.SKEW)
    store.write(make_snapshot(1, 4), rank=0)
    assert commits(root) == [CommitId(1, 4)]
    assert names(root) == []


def test_the_first_write_collects_expired_leases_only(root):
    clock = FakeClock()
    dead = leases.Lease(root, OLD, clock)
    dead.last()
    clock.advance(2 * leases.SPARE + leases.SKEW)
    with leases.reading(root, OLD, clock):
        write(root, 1, clock=clock)
        assert len(names(root)) == 1


def test_an_incomplete_commit_that_is_being_read_is_no_leftover_yet(root):
    """Its manifest was removed by a process that was killed before it looked for leases."""
    store = write(root, 1, 2)
    root.remove("g0001-c00000001/MANIFEST.json")
    with leases.reading(root, OLD, store.clock):
        make_store(root).write(make_snapshot(2, 3), rank=0)
        assert commits(root) == [CommitId(2, 3), NEW, OLD]
    make_store(root).write(make_snapshot(3, 4), rank=0)
    assert OLD not in commits(root)


@pytest.mark.parametrize("skew", [-leases.SKEW + 1, 0.0, 86400.0])
def test_a_reader_whose_clock_is_wrong_is_heeded(root, skew):
    write(root, 1)
    with leases.reading(root, OLD, FakeClock(start=10_000.0 + skew)):
        assert not delete_unless_read(root, OLD, FakeClock(start=10_000.0))
        assert is_complete(root, OLD)


def test_a_root_whose_only_files_are_leases_is_no_foreign_one(root):
    with leases.reading(root, OLD, FakeClock()):
        assert make_store(root).claim_next() == 1
    assert make_store(root).claim_next() == 2


# -- all interleavings ---------------------------------------------------------------------------------


def outcome(result):
    if isinstance(result, Snapshot):
        assert_is(result, expected(result.id.commit))
        return "read"
    assert isinstance(result, IncompleteCommitError), result
    assert result.url.endswith("/MANIFEST.json"), result
    return "no commit"


def test_whatever_the_order_a_reader_finds_no_commit_or_keeps_it():
    found = collections.Counter()
    with memory_root() as root:
        write(root, 1)
        whole = content(root)

        def start():
            for path, data in whole.items():
                root.publish(path, data)
            clock = FakeClock()
            return [
                Thread(lambda storage: read_commit(storage, OLD, clock=clock), root),
                Thread(lambda storage: delete_unless_read(storage, OLD, clock), root),
            ]

        for reader, deletion in every_order(start):
            assert isinstance(deletion.result, bool), deletion.result
            if deletion.result:
                assert commits(root) == []
            else:
                assert content(root) == whole
            assert names(root) == []
            found[outcome(reader.result), deletion.result] += 1
    assert set(found) == {("read", True), ("read", False), ("no commit", True), ("no commit", False)}


def test_whatever_the_order_a_walk_never_takes_a_whole_commit_for_a_broken_one():
    found = collections.Counter()
    with memory_root() as root:
        write(root, 1)
        whole = content(root)
        errors = []

        def start():
            for path, data in whole.items():
                root.publish(path, data)
            clock = FakeClock()
            return [
                Thread(
                    lambda storage: read_newest(storage, lambda *skip: errors.append(skip[2]), clock=clock),
                    root,
                ),
                Thread(lambda storage: delete_unless_read(storage, OLD, clock), root),
            ]

        for reader, deletion in every_order(start):
            assert isinstance(deletion.result, bool), deletion.result
            assert reader.result is None or isinstance(reader.result, Snapshot), reader.result
            found[reader.result is None, deletion.result] += 1
        assert set(errors) == {None}
    assert set(found) == {(False, True), (False, False), (True, True), (True, False)}


def test_whatever_the_order_two_deletions_do_not_disturb_each_other():
    """Those of the job, and of a person who prunes beside it."""
    with memory_root() as root:
        write(root, 1)
        whole = content(root)

        def start():
            for path, data in whole.items():
                root.publish(path, data)
            clock = FakeClock()
            return [Thread(lambda storage: delete_unless_read(storage, OLD, clock), root) for _ in range(2)]

        for deletions in every_order(start):
            assert [deletion.result for deletion in deletions] == [True, True]
            assert commits(root) == []


def test_a_load_leaves_no_lease(root):
    store = write(root, 1, 2)
    load_newest(store)
    assert names(root) == []
