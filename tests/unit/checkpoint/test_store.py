"""Writing to a root: its claims, its commits, and the files that are deleted there."""

import os

import pytest

from hvdrecover.checkpoint import Best, CommitId, Keep
from hvdrecover.checkpoint.arena import Arena, TensorSpec, plan
from hvdrecover.checkpoint.manifest import FILE_NAME, Snapshot
from hvdrecover.checkpoint.root import QUARANTINE, commits, is_complete, is_quarantined
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.store import load_newest
from hvdrecover.errors import FencedError, ForeignRootError, NoUsableCommitError, StorageError
from tests.fakes.clock import FakeClock
from tests.integration.mounts import mounted
from tests.unit.checkpoint.roots import Killed, Wrapped, assert_is, content, make_snapshot, make_store


def write_all(store, *snapshots):
    for snapshot in snapshots:
        store.write(snapshot, rank=0)


# -- claims --------------------------------------------------------------------------------------------


def test_a_claim_is_later_than_all_claims_and_commits(root):
    store = make_store(root)
    store.claim_next()
    store.claims.take(7)
    assert make_store(root).claim_next() == 8
    root.publish(f"g0030-c00000001/{FILE_NAME}", b"broken, but there")
    assert make_store(root).claim_next() == 31


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"3", b"{}", b"\xff", b'{"job": "x"}', b"[" * 100_000])
def test_a_damaged_claim_is_nobodys_and_may_have_had_commits(root, text):
    root.publish("claims/g0004.json", text)
    store = make_store(root)
    claim = store.claims.read(4)
    assert (claim.job, claim.acknowledged) == ("", True)
    assert store.claim_next() == 5


# -- whose root ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "files",
    [
        {"thesis.tex": b"text"},
        {"photos/1.jpg": b"jpg", "photos/2.jpg": b"jpg"},
        {"g1-c1/model.safetensors": b"almost ours"},
        {"claims/2024/insurance.pdf": b"not those claims"},
        {"claims/insurance.json": b"{}"},
        {"g0001-c00000001/model.safetensors": b"ours", "thesis.tex": b"but this is not"},
        {".hidden": b""},
    ],
)
def test_a_foreign_root_is_refused_and_left_byte_for_byte(root, files):
    for path, data in files.items():
        root.publish(path, data)
    wrapped = Wrapped(root)
    with pytest.raises(ForeignRootError, match=f"^{root.url}: ") as caught:
        make_store(wrapped).claim_next()
    assert any(path.split("/")[0] in str(caught.value) for path in files)
    assert content(root) == files
    assert wrapped.calls == []


# -- writing -------------------------------------------------------------------------------------------


def test_a_second_attempt_never_alters_files_under_a_manifest(root):
    wrapped = Wrapped(root)
    store = make_store(wrapped)
    store.claim_next()
    wrapped.plan = [None, None, None, None, StorageError("url", "acknowledging failed")]
    with pytest.raises(StorageError, match="acknowledging"):
        write_all(store, make_snapshot(1, 1))
    assert is_complete(store.storage, CommitId(1, 1))
    wrapped.calls.clear()
    write_all(store, make_snapshot(1, 1))
    verbs = [call for call in wrapped.calls if call.startswith(("remove", "write", "publish g"))]
    assert verbs[0] == f"remove g0001-c00000001/{FILE_NAME}"
    assert verbs[-1] == f"publish g0001-c00000001/{FILE_NAME}"
    assert_is(load_newest(make_store(root)), make_snapshot(1, 1))


# -- leftovers -----------------------------------------------------------------------------------------


def test_what_was_never_completed_is_collected_before_the_next_write_and_not_at_the_start(root):
    """All ranks wait for a start, and to delete gigabytes takes time."""
    write_all(make_store(root), make_snapshot(1, 1))
    root.publish("g0001-c00000002/model.safetensors", b"half")
    wrapped = Wrapped(root)
    store = make_store(wrapped)
    store.claim_next()
    assert wrapped.calls == ["create claims/g0002.json"]
    write_all(store, make_snapshot(2, 3))
    assert commits(store.storage) == [CommitId(2, 3), CommitId(1, 1)]
    calls = [call for call in wrapped.calls if call.startswith(("delete", "write"))]
    assert calls[0] == "delete g0001-c00000002"
    (leftover,) = store.events.of("leftover")
    assert leftover["commit"] == "g0001-c00000002"
    assert "never completed" in leftover["message"]


def test_a_commit_that_lost_only_its_manifest_is_quarantined_and_no_leftover(root):
    """The claim says that there were commits, and retention never deletes the newest one."""
    write_all(make_store(root), make_snapshot(1, 1), make_snapshot(1, 2))
    for commit in (1, 2):
        root.remove(f"g0001-c0000000{commit}/{FILE_NAME}")
    before = content(root)
    store = make_store(root)
    store.claim_next()
    assert before.items() <= content(root).items()
    assert is_quarantined(root, CommitId(1, 2))
    with pytest.raises(NoUsableCommitError) as caught:
        load_newest(store)
    assert list(caught.value.reasons) == ["generation 1"]
    assert {skipped["reason"] for skipped in store.events.of("skipped")} == {"its manifest is gone"}


def large(generation, commit, nbytes):
    halves = {name: Arena(plan([TensorSpec("w", "U8", (nbytes // 2,))])) for name in ("model", "optimizer")}
    return Snapshot(CommitId(generation, commit), halves, {"attributes": {}}, 1, {})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(1, 12))
def test_whatever_kills_rank_0_the_root_holds_two_commits_and_the_one_being_written(root, step, after):
    """The other ranks live on, so the next rank 0 never starts the job again."""
    make_store(root).claim_next()
    for generation in range(1, 6):
        wrapped = Wrapped(root)
        wrapped.kill_at, wrapped.after = step, after
        rank_0 = make_store(wrapped, keep=1)
        with pytest.raises(Killed):
            for number in range(10):
                rank_0.write(make_snapshot(generation + 1, 10 * generation + number), rank=0)
        assert len(commits(root)) <= 3
    make_store(root, keep=1).write(make_snapshot(90, 900), rank=0)
    assert commits(root) == [CommitId(90, 900)]


def test_a_commit_that_was_replaced_in_an_outage_leaves_nothing(root):
    class Away(Wrapped):
        away = True

        def publish(self, path, data):
            if self.away and path.endswith(FILE_NAME):
                raise StorageError(path, "the storage is away")
            self.mutate("publish", path, data)

    storage = Away(root)
    store = make_store(storage, keep=1)
    store.claim_next()
    for number in range(1, 6):
        with pytest.raises(StorageError):
            store.write(make_snapshot(1, number), rank=0)
        assert commits(root) == [CommitId(1, number)]
    storage.away = False
    store.write(make_snapshot(1, 6), rank=0)
    assert commits(root) == [CommitId(1, 6)]


def test_the_commit_that_a_job_was_resumed_from_stays_until_a_later_one_is_durable(root):
    """The newer ones may be why the last start failed."""
    earlier = make_store(root, keep=9)
    earlier.claim_next()
    for number in (1, 2, 3, 4):
        earlier.write(make_snapshot(1, number), rank=0)
    wrapped = Wrapped(root)
    store = make_store(wrapped, keep=1)
    store.claim_next()
    store.resumed = CommitId(1, 1)
    seen = []
    write = wrapped.write
    wrapped.write = lambda *args: seen.append(commits(root)) or write(*args)
    store.write(make_snapshot(2, 5), rank=0)
    assert seen[0] == [CommitId(1, 4), CommitId(1, 3), CommitId(1, 2), CommitId(1, 1)]
    assert commits(root) == [CommitId(2, 5)]


# -- a disk that is full -------------------------------------------------------------------------------

NBYTES = 6 << 20


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request, tmp_path):
    with mounted(request.param, tmp_path / "disk", tmp_path / "image", 24 << 20) as found:
        yield found


def test_a_part_that_fitted_is_given_back_to_a_full_disk(disk):
    store = make_store(LocalStorage(disk.folder / "root"), keep=1)
    store.claim_next()
    store.write(large(1, 1, NBYTES), 0)
    disk.fill(NBYTES // 2 + (1 << 19))  # the model's file, and not the optimizer's
    with pytest.raises(StorageError, match="No space left on device"):
        store.write(large(1, 2, NBYTES), 0)
    assert commits(store.storage) == [CommitId(1, 1)]
    free = os.statvfs(disk.folder)
    assert free.f_bavail * free.f_frsize >= NBYTES // 2
    disk.free()
    store.write(large(1, 2, NBYTES), 0)
    assert commits(store.storage) == [CommitId(1, 2)]


def test_a_full_disk_gets_back_what_a_killed_process_has_left(disk):
    """The leftovers do not fit beside the commits to keep, and the next process has not deleted them."""
    root = disk.folder / "root"
    store = make_store(LocalStorage(root), keep=1)
    store.claim_next()
    store.write(large(1, 1, NBYTES), 0)
    rank_0 = make_store(LocalStorage(root), keep=1)
    rank_0._has_made_room = True  # the leftovers come after that
    left = root / "g0001-c00000009"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(12 << 20))
    rank_0.write(large(2, 2, NBYTES), 0)
    assert commits(rank_0.storage) == [CommitId(2, 2)]


# -- retention -----------------------------------------------------------------------------------------


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
            self.mutate("publish", path, data)
            if path == f"g0001-c00000002/{FILE_NAME}":
                make_store(root, job="new").claim_next()

    store = make_store(Overtaken(root), keep=1, job="old")
    write_all(store, make_snapshot(1, 1), make_snapshot(1, 2))
    assert commits(root) == [CommitId(1, 2), CommitId(1, 1)]
    with pytest.raises(FencedError):
        write_all(store, make_snapshot(1, 3))
