"""The files that a job deletes at its root after each durable commit."""

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.root import QUARANTINE, commits
from hvdrecover.checkpoint.settings import Best, Keep
from hvdrecover.errors import FencedError, StorageError
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import Wrapped, make_snapshot, make_store


def write_all(store, *snapshots):
    for snapshot in snapshots:
        store.write(snapshot, rank=0)


def test_quarantined_commits_are_neither_deleted_nor_counted(root):
    write_all(make_store(root, keep=9), *(make_snapshot(1, commit) for commit in (1, 2, 3)))
    root.publish(f"g0001-c00000003/{QUARANTINE}", b"{}")
    store = make_store(root, keep=2)
    store.claim_next()
    write_all(store, make_snapshot(2, 4))
    assert commits(store.storage) == [CommitId(2, 4), CommitId(1, 3), CommitId(1, 2)]
    write_all(store, make_snapshot(2, 5), make_snapshot(2, 6))
    assert commits(store.storage) == [CommitId(2, 6), CommitId(2, 5), CommitId(1, 3)]


def with_loss(commit, loss):
    snapshot = make_snapshot(1, commit)
    snapshot.state["attributes"]["loss"] = loss
    return snapshot


def test_all_rules_are_followed(root):
    clock = FakeClock(start=0.0)
    keep = Keep(last=1, period=10, within=25.0, best=Best("loss"))
    store = make_store(root, keep=keep, clock=clock)
    for commit in range(1, 31):
        clock.advance(10.0)
        write_all(store, with_loss(commit, abs(commit - 17) + 0.5))
    assert [commit.commit for commit in commits(root)] == [30, 29, 28, 20, 17, 10, 1]


def test_a_commit_whose_manifest_is_broken_is_left_to_the_user_and_not_counted(root):
    write_all(make_store(root), *(make_snapshot(1, commit) for commit in (1, 2, 3)))
    root.publish(f"g0001-c00000003/{FILE_NAME}", b"broken")
    root.publish(f"g0001-c00000002/{FILE_NAME}", b'{"format": 99}')
    store = make_store(root, keep=2)
    write_all(store, make_snapshot(2, 4))
    assert [commit.commit for commit in commits(root)] == [4, 3, 2, 1]
    write_all(store, make_snapshot(2, 5))
    assert [commit.commit for commit in commits(root)] == [5, 4, 3, 2]


def test_a_manifest_that_cannot_be_read_for_a_while_does_not_stop_the_rest(root):
    write_all(make_store(root), *(make_snapshot(1, commit) for commit in (1, 2)))
    wrapped = Wrapped(root)
    sick = True

    def read(path):
        if sick and path.startswith("g0001-c00000001"):
            raise StorageError(path, "I/O error")
        return root.read(path)

    wrapped.read = read
    store = make_store(wrapped, keep=1)
    write_all(store, make_snapshot(2, 3))
    assert commits(root) == [CommitId(2, 3), CommitId(1, 1)]
    sick = False
    write_all(store, make_snapshot(2, 4))
    assert commits(root) == [CommitId(2, 4)]


def test_a_job_that_is_replaced_while_it_writes_deletes_nothing(root):
    class Overtaken(Wrapped):
        def publish(self, path, data):
            super().publish(path, data)
            if path == f"g0001-c00000002/{FILE_NAME}":
                make_store(root, job="new").claim_next()

    store = make_store(Overtaken(root), keep=1, job="old")
    write_all(store, make_snapshot(1, 1), make_snapshot(1, 2))
    assert commits(root) == [CommitId(1, 2), CommitId(1, 1)]
    with pytest.raises(FencedError):
        write_all(store, make_snapshot(1, 3))
