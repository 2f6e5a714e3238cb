"""Verifying commits, and pruning by hand."""

from __future__ import annotations

import threading

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import prune, verify
from hvdrecover.checkpoint.settings import Best, Keep
from hvdrecover.errors import ConfigError, CorruptCheckpointError, StorageError, UnknownCommitError
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import content, make_snapshot, make_store

CLOCK = FakeClock(start=1000.0)
COMMITS = [CommitId(1, number) for number in (3, 2, 1)]


def ignore(count):
    pass


@pytest.fixture
def storage(root):
    """A root with the commits 1, 2 and 3."""
    store = make_store(root, clock=FakeClock(start=50.0), keep=9)
    store.claim_next()
    for number in (1, 2, 3):
        store.write(make_snapshot(1, number), rank=0)
    return root


def flip(storage, path, where=-1):
    data = bytearray(storage.read(path))
    data[where] ^= 0x80
    storage.publish(path, bytes(data))


def test_an_intact_commit_is_read_through(storage, monkeypatch):
    monkeypatch.setattr(verify, "PIECE", 4096)
    told = []
    verdict = verify.verify(storage, CommitId(1, 1), told.append)
    assert (verdict.intact, verdict.problems, verdict.text) == (True, {}, "")
    sizes = [storage.size(f"g0001-c00000001/{name}.safetensors") for name in ("model", "optimizer")]
    assert verdict.nbytes == sum(sizes) == sum(told) == verify.total_bytes(storage, [CommitId(1, 1)])
    assert told == [4096, sizes[0] - 4096, 4096, sizes[1] - 4096]


@pytest.mark.parametrize("where", [5000, -1], ids=["in the middle", "at the end"])
def test_a_flipped_bit_is_found(storage, where):
    flip(storage, "g0001-c00000001/model.safetensors", where)
    verdict = verify.verify(storage, CommitId(1, 1), ignore)
    assert list(verdict.problems) == ["model.safetensors"]
    assert "digest" in verdict.problems["model.safetensors"]


def test_without_names_all_complete_commits_are_due(storage):
    storage.publish("g0001-c00000004/model.safetensors", b"half")
    assert verify.due(storage, []) == COMMITS
    assert verify.due(storage, ["1", "g0001-c00000003", "1"]) == [COMMITS[2], COMMITS[0]]
    with pytest.raises(UnknownCommitError):
        verify.due(storage, ["9"])


def test_a_commit_that_a_job_deletes_meanwhile_is_left_out(storage):
    storage.delete("g0001-c00000002")
    assert list(verify.verify_all(storage, COMMITS, ignore)) == [COMMITS[0], COMMITS[2]]


def test_storage_that_fails_says_nothing_about_the_commit(storage, monkeypatch):
    def away(path, buffer, start=0):
        raise StorageError(path, "the network is down")

    monkeypatch.setattr(storage, "read_into", away)
    with pytest.raises(StorageError, match="network"):
        verify.verify(storage, COMMITS[0], ignore)


# -- pruning -------------------------------------------------------------------------------------------


def names(entries):
    return [entry.id.commit for entry in entries]


def test_a_plan_tells_what_goes_what_stays_and_what_is_never_touched(storage):
    storage.publish("g0001-c00000002/QUARANTINE.json", b"{}")
    storage.publish("g0001-c00000004/model.safetensors", b"half")
    before = content(storage)
    plan = prune.plan(storage, Keep(1), CLOCK)
    assert (names(plan.delete), names(plan.keep), names(plan.untouched)) == ([1], [3], [4, 2])
    assert content(storage) == before


def test_a_metric_that_no_commit_has_is_an_error(storage):
    with pytest.raises(ConfigError, match=r"^--keep-best: .*'loss'"):
        prune.plan(storage, Keep(1, best=Best("loss")), CLOCK)


def test_the_only_commit_that_is_intact_is_not_deleted(storage):
    flip(storage, "g0001-c00000003/model.safetensors")
    plan = prune.plan(storage, Keep(1), CLOCK)
    with pytest.raises(CorruptCheckpointError, match=r"g0001-c00000003: model\.safetensors: .*digest"):
        prune.check_one_is_intact(storage, plan, ignore)
    prune.check_one_is_intact(storage, prune.plan(storage, Keep(2), CLOCK), ignore)
    prune.check_one_is_intact(storage, prune.plan(storage, Keep(3), CLOCK), ignore)


def test_pruning_beside_a_job_leaves_the_newest_commits_whole(root):
    """The job writes and prunes too; which of the two deletes a commit must not matter to either."""
    store = make_store(root, keep=3)
    store.claim_next()
    store.write(make_snapshot(1, 1), rank=0)
    over, failures = threading.Event(), []

    def job():
        try:
            for number in range(2, 40):
                store.write(make_snapshot(1, number), rank=0)
        except BaseException as error:
            failures.append(error)
        finally:
            over.set()

    thread = threading.Thread(target=job)
    thread.start()
    while not over.is_set():
        plan = prune.plan(root, Keep(2), CLOCK)
        assert {entry.state for entry in plan.untouched} <= {"incomplete"}
        list(prune.delete(root, plan))
    thread.join()
    assert failures == []
    assert store.events.of("not_deleted") == []
    commits = verify.due(root, [])
    assert [commit.commit for commit in commits][:2] == [39, 38]
    assert all(verdict.intact for verdict in verify.verify_all(root, commits, ignore).values())
