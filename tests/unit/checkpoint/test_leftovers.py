"""The leftovers of killed processes, outages and full disks at a root are deleted, and nothing else is."""

import os

import numpy as np
import pytest

from hvdrecover.checkpoint.arena import Arena
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.layout import TensorSpec, plan
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.reader import load_newest
from hvdrecover.checkpoint.root import commits
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.errors import FencedError, StorageError
from tests.integration.mounts import mounted
from tests.unit.checkpoint.roots import Killed, Wrapped, make_snapshot, make_store


def large(generation, commit, nbytes):
    halves = {name: Arena(plan([TensorSpec("w", "U8", (nbytes // 2,))])) for name in ("model", "optimizer")}
    return Snapshot(CommitId(generation, commit), halves, {"attributes": {}}, 1, {})


def used(root):
    """The bytes that all files of a root take on the disk."""
    return sum(path.lstat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


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


def test_a_commit_that_turns_out_to_be_whole_is_no_leftover(root):
    """Its publication was answered by an error, and a newer commit is written next."""
    wrapped = Wrapped(root)
    store = make_store(wrapped, keep=2)
    store.claim_next()
    publish = wrapped.publish

    def lossy(path, data):
        publish(path, data)
        if path == f"g0001-c00000001/{FILE_NAME}":
            raise StorageError(path, "the answer was lost")

    wrapped.publish = lossy
    with pytest.raises(StorageError):
        store.write(make_snapshot(1, 1), rank=0)
    store.write(make_snapshot(1, 2), rank=0)
    assert commits(root) == [CommitId(1, 2), CommitId(1, 1)]
    store.write(make_snapshot(1, 3), rank=0)  # and retention counts it
    assert commits(root) == [CommitId(1, 3), CommitId(1, 2)]


def test_what_a_process_left_behind_has_written_after_all_is_collected(root):
    """It was stopped while it wrote, and continues when the next rank 0 has cleaned up."""
    left_behind, rank_0 = make_store(root), make_store(root)
    left_behind.claim_next()
    rank_0.write(make_snapshot(2, 2), rank=0)
    root.publish("g0001-c00000009/optimizer.safetensors", b"late")
    rank_0.write(make_snapshot(2, 3), rank=0)
    assert commits(root) == [CommitId(2, 3), CommitId(2, 2)]


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


def test_the_resumed_commit_is_the_one_that_was_read(root):
    store = make_store(root)
    store.claim_next()
    store.write(make_snapshot(1, 1), rank=0)
    store = make_store(root, job="next")
    store.claim_next()
    load_newest(store)
    assert store.resumed == CommitId(1, 1)


# -- whose files lie aside -----------------------------------------------------------------------------


def test_an_old_job_takes_no_file_of_a_new_one(tmp_path):
    """It was stopped between its claim and its cleaning up, and continues while the new job writes."""
    root_folder = tmp_path / "root"
    old = make_store(LocalStorage(root_folder), job="old")
    old.claim_next()
    tidy = old.storage.tidy

    def after_a_stop(*args):
        new = make_store(LocalStorage(root_folder), job="new", keep=1)
        new.claim_next()
        for number in (1, 2, 3):
            new.write(make_snapshot(2, number), rank=0)
        (root_folder / "g0002-c00000004").mkdir()
        for name in ("model.safetensors", ".hvdrecover-1234"):
            (root_folder / "g0002-c00000004" / name).write_bytes(b"under way")
        kept.append(files(root_folder))
        tidy(*args)

    kept = []
    old.storage.tidy = after_a_stop
    with pytest.raises(FencedError):
        old.write(make_snapshot(1, 1), rank=0)
    assert [path for path in kept[0] if "hvdrecover" in path] != []
    assert [path for path in files(root_folder) if not path.startswith("g0001")] == kept[0]


def test_a_folder_that_lies_aside_is_none_of_these_files(tmp_path):
    """Such as that in which `hvdrecover doctor` tries out what a root can do."""
    (tmp_path / "root" / ".hvdrecover-doctor").mkdir(parents=True)
    store = make_store(LocalStorage(tmp_path / "root"))
    store.claim_next()
    assert store.storage.temporaries() == []
    assert store.events.of("not_deleted") == []


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


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


def test_a_write_that_does_not_fit_keeps_no_block(disk):
    storage = LocalStorage(disk.folder)
    disk.fill(1 << 20)
    with pytest.raises(StorageError, match="No space left on device"):
        storage.write("g0001-c00000001/model.safetensors", np.ones(8 << 20, dtype=np.uint8))
    assert used(disk.folder / "g0001-c00000001") == 0
