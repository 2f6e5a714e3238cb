"""Real disks that are full, read-only, gone or broken: what was acknowledged stays, and writing continues."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.manifest import FILE_NAME, Snapshot
from hvdrecover.checkpoint.store import Store, load_newest
from hvdrecover.errors import StorageError
from tests.fakes.clock import FakeClock
from tests.integration.crash_writer import check_opens, make_commit, open_store
from tests.integration.mounts import PAGE, Disk, mounted, while_failing
from tests.unit.checkpoint.roots import Recorder, assert_is

NBYTES = 300_000


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with mounted(request.param, tmp_path / "disk", tmp_path / "image", nbytes=24 << 20) as found:
        yield found


def commit(number: int, nbytes: int = NBYTES) -> Snapshot:
    return make_commit(CommitId(1, number), nbytes)


def store_with_a_commit(root: Path, nbytes: int = NBYTES) -> Store:
    store = open_store(root, Recorder(), FakeClock())
    assert store.claim_next() == 1
    store.write(commit(1, nbytes), rank=0)
    return store


def refused(store: Store, number: int, cause: str | None, nbytes: int = NBYTES) -> None:
    """A write fails with an error that names root and cause, and the first commit stands."""
    with pytest.raises(StorageError, match=cause) as caught:
        store.write(commit(number, nbytes), rank=0)
    assert caught.value.url.startswith(store.url)
    assert str(caught.value).startswith(store.url)


def test_wherever_the_space_runs_out_a_commit_is_acknowledged_or_refused(disk: Disk) -> None:
    root = disk.folder / "root"
    store = store_with_a_commit(root, nbytes=PAGE)
    acknowledged, failed = 1, 0
    for number in range(2, 26):
        disk.fill(spare=(number - 2) * PAGE)
        try:
            store.write(commit(number, nbytes=PAGE), rank=0)
        except StorageError as error:
            assert "No space left on device" in str(error)
            failed += 1
        else:
            acknowledged = number
        disk.free()  # also so that readers can leave a note that they read
        found = check_opens(root, CommitId(1, acknowledged))
        # One whose manifest made it, and not the note in the claim, is complete and was not acknowledged.
        assert found in (CommitId(1, acknowledged), CommitId(1, number))
    assert 0 < failed < 24


def test_a_root_that_turns_read_only_is_read_and_written_when_it_is_writable_again(disk: Disk) -> None:
    root = disk.folder / "root"
    store = store_with_a_commit(root)
    store.write(commit(2), rank=0)
    (root / "g0001-c00000002" / "model.safetensors").write_bytes(b"broken")
    disk.remount("ro")
    refused(store, 3, "Read-only file system")
    assert_is(load_newest(store), commit(1))  # what is broken can't be marked, and is passed over
    with pytest.raises(StorageError, match="Read-only file system"):
        open_store(root, Recorder()).claim_next()
    disk.remount("rw")
    store.write(commit(3), rank=0)
    assert check_opens(root, CommitId(1, 3)) == CommitId(1, 3)


def test_a_root_that_is_unmounted_is_not_made_anew_below(disk: Disk, tmp_path: Path) -> None:
    root = disk.folder / "root"
    store = store_with_a_commit(root)
    disk.detach()
    assert list(disk.folder.iterdir()) == []
    for _ in range(2):
        refused(store, 2, cause=None)
        assert list(disk.folder.iterdir()) == []
    with pytest.raises(StorageError):
        store.write(make_commit(CommitId(2, 2)), rank=0)  # after a recovery
    assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize("call", ["pwrite", "fsync", "write", "rename"])
def test_a_disk_that_fails_to_write_loses_nothing_and_continues_when_it_works(
    tmp_path: Path, call: str
) -> None:
    store = store_with_a_commit(tmp_path)
    while_failing(call, lambda: refused(store, 2, "Input/output error"))
    assert check_opens(tmp_path, CommitId(1, 1)) == CommitId(1, 1)
    store.write(commit(2), rank=0)
    assert check_opens(tmp_path, CommitId(1, 2)) == CommitId(1, 2)


def test_after_an_fsync_that_failed_the_file_is_written_anew(tmp_path: Path) -> None:
    """The kernel may drop what it could not write, and call the next fsync a success."""
    store = store_with_a_commit(tmp_path)
    folder = tmp_path / "g0001-c00000002"
    folder.mkdir()  # so that the first fsync is that of a data file
    while_failing("fsync", lambda: refused(store, 2, "model.*Input/output error"))
    assert not (folder / FILE_NAME).exists()
    written = folder / "model.safetensors"
    assert written.stat().st_size > NBYTES  # so it is that fsync which failed
    with written.open("r+b") as file:  # what the kernel does to the pages
        file.write(bytes(written.stat().st_size))
    store.write(commit(2), rank=0)
    assert check_opens(tmp_path, CommitId(1, 2)) == CommitId(1, 2)


def test_a_folder_whose_fsync_failed_is_made_anew(tmp_path: Path) -> None:
    """Found there by the next attempt, it would pass for durable, and it may not be."""
    store = store_with_a_commit(tmp_path)
    while_failing("fsync", lambda: refused(store, 2, "Input/output error"))
    assert not (tmp_path / "g0001-c00000002").exists()


def test_a_claim_that_was_made_by_an_attempt_that_failed_does_not_fence_its_own_job(tmp_path: Path) -> None:
    store = store_with_a_commit(tmp_path)
    later = make_commit(CommitId(2, 2))  # after a recovery
    with pytest.raises(StorageError, match="Input/output error"):
        while_failing("unlink", lambda: store.write(later, rank=0))
    assert (tmp_path / "claims" / "g0002.json").exists()
    store.write(later, rank=0)
    assert check_opens(tmp_path, later.id) == later.id


@pytest.mark.parametrize("call", ["read", "preadv2"])
def test_a_disk_that_fails_to_read_is_no_broken_commit(tmp_path: Path, call: str) -> None:
    store = store_with_a_commit(tmp_path)
    store.write(commit(2), rank=0)
    with pytest.raises(StorageError, match="Input/output error") as caught:
        while_failing(call, lambda: load_newest(store))
    assert caught.value.url.startswith(store.url)
    assert [path.name for path in tmp_path.rglob("QUARANTINE*")] == []
    assert check_opens(tmp_path, CommitId(1, 2)) == CommitId(1, 2)
