"""The leftovers of killed processes, outages and full disks at a root are deleted, and nothing else is."""

import os

import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import TensorSpec, plan
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.root import commits
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.errors import StorageError
from tests.integration.mounts import mounted
from tests.unit.checkpoint.roots import Killed, Wrapped, make_snapshot, make_store


def large(generation, commit, nbytes):
    halves = {name: Arena(plan([TensorSpec("w", "U8", (nbytes // 2,))])) for name in ("model", "optimizer")}
    return Snapshot(CommitId(generation, commit), halves, {"attributes": {}}, 1, {})


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", range(1, 12))
def test_whatever_kills_rank_0_the_root_holds_two_commits_and_the_one_being_written(root, step, after):
    """The other ranks live on, so the next rank 0 never starts the job anew."""
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
            super().publish(path, data)

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


# -- whose files lie aside -----------------------------------------------------------------------------


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
    """More than fits beside what is kept, as the process that came after it did not collect it."""
    root = disk.folder / "root"
    store = make_store(LocalStorage(root), keep=1)
    store.claim_next()
    store.write(large(1, 1, NBYTES), 0)
    rank_0 = make_store(LocalStorage(root), keep=1)
    rank_0._has_made_room = True  # what is left comes after that
    left = root / "g0001-c00000009"
    left.mkdir()
    (left / "model.safetensors").write_bytes(bytes(12 << 20))
    rank_0.write(large(2, 2, NBYTES), 0)
    assert commits(rank_0.storage) == [CommitId(2, 2)]
