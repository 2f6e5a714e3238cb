"""Writing to a root and reading from it: claims, commits, and the files that are deleted there."""

from __future__ import annotations

import json
import logging
import math
import os
import re

import pytest

from hvdrecover.checkpoint import Best, CommitId, Keep
from hvdrecover.checkpoint.arena import Arena, TensorSpec, plan
from hvdrecover.checkpoint.manifest import FILE_NAME, Snapshot
from hvdrecover.checkpoint.root import QUARANTINE, commits, is_complete, is_quarantined
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.store import load_newest
from hvdrecover.errors import (
    FencedError,
    ForeignRootError,
    FormatVersionError,
    NoUsableCommitError,
    StorageError,
)
from tests.fakes.clock import FakeClock
from tests.integration.mounts import mounted
from tests.unit.checkpoint.roots import Killed, Wrapped, assert_is, content, flip, make_snapshot, make_store


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


def test_commits_that_are_quarantined_broken_or_of_a_newer_format_are_neither_deleted_nor_counted(root):
    write_all(make_store(root, keep=9), *(make_snapshot(1, commit) for commit in (1, 2, 3, 4)))
    root.publish(f"g0001-c00000004/{QUARANTINE}", b"{}")
    root.publish(f"g0001-c00000003/{FILE_NAME}", b"broken")
    root.publish(f"g0001-c00000002/{FILE_NAME}", b'{"format": 99}')
    store = make_store(root, keep=2)
    store.claim_next()
    write_all(store, make_snapshot(2, 5))
    assert [commit.commit for commit in commits(root)] == [5, 4, 3, 2, 1]
    write_all(store, make_snapshot(2, 6), make_snapshot(2, 7))
    assert [commit.commit for commit in commits(root)] == [7, 6, 4, 3, 2]


def test_all_rules_are_followed(root):
    clock = FakeClock(start=0.0)
    keep = Keep(last=1, period=10, within=25.0, best=Best("loss"))
    store = make_store(root, keep=keep, clock=clock)
    for commit in range(1, 31):
        clock.advance(10.0)
        snapshot = make_snapshot(1, commit)
        snapshot.state["attributes"]["loss"] = abs(commit - 17) + 0.5
        write_all(store, snapshot)
    assert [commit.commit for commit in commits(root)] == [30, 29, 28, 20, 17, 10, 1]


def test_a_manifest_that_cannot_be_read_for_a_while_does_not_stop_the_rest(root):
    write_all(make_store(root), *(make_snapshot(1, commit) for commit in (1, 2)))
    sick = Sick(root, "g0001-c00000001")
    store = make_store(sick, keep=1)
    write_all(store, make_snapshot(2, 3))
    assert commits(root) == [CommitId(2, 3), CommitId(1, 1)]
    sick.left = 0
    write_all(store, make_snapshot(2, 4))
    assert commits(root) == [CommitId(2, 4)]


def test_a_job_that_is_replaced_while_it_writes_deletes_nothing(root):
    class Overtaken(Wrapped):
        def publish(self, path, data):
            self.mutate("publish", path, data)
            if path == f"g0001-c00000002/{FILE_NAME}":
                make_store(root, job="new").claim_next()

    store = make_store(Overtaken(root), keep=1, job="old")
    write_all(store, make_snapshot(1, 1))
    with pytest.raises(FencedError):  # the new job may not have seen the manifest, so it is not durable
        write_all(store, make_snapshot(1, 2))
    assert commits(root) == [CommitId(1, 2), CommitId(1, 1)]
    with pytest.raises(FencedError):
        write_all(store, make_snapshot(1, 3))


# -- reading ---------------------------------------------------------------------------------------------


OLDER, NEWEST = "g0001-c00000001", "g0001-c00000002"
MODEL = f"{NEWEST}/model.safetensors"
MANIFEST = f"{NEWEST}/{FILE_NAME}"


@pytest.fixture
def store(root):
    """A root with two commits."""
    store = make_store(root, clock=FakeClock(start=50.0))
    store.claim_next()
    for commit in (1, 2):
        store.write(make_snapshot(1, commit), rank=0)
    return store


def truncate(storage, path):
    storage.publish(path, storage.read(path)[:-1])


def lengthen(storage, path):
    storage.publish(path, storage.read(path) + b"\0")


def lose(storage, path):
    storage.remove(path)


DAMAGES = {
    "a truncated file": (truncate, MODEL, r"model\.safetensors: .* 8095 bytes, .* 8096$"),
    "a longer file": (lengthen, MODEL, r"model\.safetensors: .* 8097 bytes, .* 8096$"),
    "a flipped bit": (flip, MODEL, r"model\.safetensors: .*digest"),
    "a missing file": (lose, MODEL, r"model\.safetensors: .*missing"),
    "a truncated manifest": (truncate, MANIFEST, r"MANIFEST\.json: .*JSON"),
    "a flipped bit in the manifest": (flip, MANIFEST, r"MANIFEST\.json: "),
}


@pytest.mark.parametrize(("damage", "path", "facts"), DAMAGES.values(), ids=DAMAGES.keys())
def test_a_broken_commit_is_walked_back_over_and_quarantined_with_the_reason(store, damage, path, facts):
    damage(store.storage, path)
    before = content(store.storage)
    assert_is(load_newest(store), make_snapshot(1, 1))
    (skipped,) = store.events.of("skipped")
    assert (skipped["commit"], skipped["level"]) == (NEWEST, logging.WARNING)
    assert re.match(facts, skipped["reason"])
    assert skipped["message"] == f"{store.url}: skipping {NEWEST}: {skipped['reason']}"
    after = content(store.storage)
    note = json.loads(after.pop(f"{NEWEST}/{QUARANTINE}"))
    assert note == {"time": 50.0, "reason": skipped["reason"]}
    assert after == before  # nothing was deleted


def test_a_quarantined_commit_that_was_repaired_is_used_and_a_normal_commit_again(store):
    whole = store.storage.read(MODEL)
    flip(store.storage, MODEL)
    load_newest(store)
    store.storage.publish(MODEL, whole)
    later = make_store(store.storage)
    assert_is(load_newest(later), make_snapshot(1, 2))
    assert not is_quarantined(later.storage, CommitId(1, 2))


def test_a_suspect_is_passed_over_and_stays_a_normal_commit(store):
    assert load_newest(store, [(NEWEST, NEWEST)]).id.name == OLDER
    (skipped,) = store.events.of("skipped")
    assert f"passing over {NEWEST}, which is suspect" in skipped["message"]
    assert load_newest(store).id.name == NEWEST


def test_suspects_alone_are_better_than_nothing_the_oldest_first(store):
    assert load_newest(store, [(OLDER, NEWEST)]).id.name == OLDER
    flip(store.storage, f"{OLDER}/model.safetensors")
    assert load_newest(store, [(OLDER, NEWEST)]).id.name == NEWEST


def test_every_commit_broken_is_an_error_that_lists_each_and_why(store):
    flip(store.storage, MODEL)
    lose(store.storage, f"{OLDER}/optimizer.safetensors")
    with pytest.raises(NoUsableCommitError) as caught:
        load_newest(store)
    assert list(caught.value.reasons) == [NEWEST, OLDER]
    assert re.match(r"model\.safetensors: .*digest", caught.value.reasons[NEWEST])
    assert re.match(r"optimizer\.safetensors: .*missing", caught.value.reasons[OLDER])
    for commit, reason in caught.value.reasons.items():
        assert f"\n  {commit}: {reason}\n" in str(caught.value)


@pytest.mark.parametrize("start", [False, True], ids=["at once", "at the next start"])
@pytest.mark.parametrize("lost", ["folders", "manifests"])
def test_commits_that_are_gone_are_an_error_and_no_fresh_start(store, lost, start):
    for name in (NEWEST, OLDER):
        store.storage.delete(name) if lost == "folders" else store.storage.remove(f"{name}/{FILE_NAME}")
    reader = make_store(store.storage)
    if start:
        reader.claim_next()
    with pytest.raises(NoUsableCommitError) as caught:
        load_newest(reader)
    assert list(caught.value.reasons) == ["generation 1"]


def test_going_back_to_an_earlier_generation_because_a_later_ones_commits_are_gone_is_said(store):
    store.write(make_snapshot(4, 3), rank=0)
    store.storage.delete("g0004-c00000003")
    later = make_store(store.storage)
    later.claim_next()
    assert_is(load_newest(later), make_snapshot(1, 2))
    (skipped,) = later.events.of("skipped")
    assert (skipped["commit"], skipped["reason"]) == ("generation 4", "its commits are gone from the root")


def test_a_newer_format_is_an_error_and_not_walked_back_over(store):
    store.storage.publish(MANIFEST, json.dumps({"format": 2, "digest": "of another kind"}).encode())
    before = content(store.storage)
    with pytest.raises(FormatVersionError, match="format 2,") as caught:
        load_newest(store)
    assert caught.value.url == f"{store.url}/{MANIFEST}"
    assert content(store.storage) == before


# -- storage that fails --------------------------------------------------------------------------------


class Sick(Wrapped):
    """A storage that fails for paths that begin in one way, so many times."""

    def __init__(self, inner, prefix, times=math.inf):
        super().__init__(inner)
        self.left = times
        self.read = lambda path: self.fail(path, prefix) or inner.read(path)
        self.read_into = lambda path, *args: self.fail(path, prefix) or inner.read_into(path, *args)
        self.size = lambda path: self.fail(path, prefix) or inner.size(path)
        self.names = lambda path="": self.fail(path, prefix) or inner.names(path)

    def fail(self, path, prefix):
        if path.startswith(prefix) and self.left > 0:
            self.left -= 1
            raise StorageError(f"{self.url}/{path}", "I/O error")


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", FILE_NAME])
def test_a_commit_that_cannot_be_read_is_walked_back_over_and_not_quarantined(store, file):
    before = content(store.storage)
    sick = make_store(Sick(store.storage, f"{NEWEST}/{file}"))
    assert_is(load_newest(sick), make_snapshot(1, 1))
    (skipped,) = sick.events.of("skipped")
    assert (skipped["commit"], skipped["level"]) == (NEWEST, logging.WARNING)
    assert re.fullmatch(f"{file}: .*I/O error", skipped["reason"])
    assert content(store.storage) == before


def test_a_storage_that_is_away_is_an_error_and_nothing_is_walked_back_over(store):
    class Lost(Sick):
        """One that is cut off when the newest commit is read."""

        def fail(self, path, prefix):
            self.cut_off = getattr(self, "cut_off", False) or path.startswith(NEWEST)
            super().fail(path, "" if self.cut_off else prefix)

    away = make_store(Lost(store.storage, NEWEST))
    with pytest.raises(StorageError, match="I/O error"):
        load_newest(away)
    assert away.events.of("skipped") == []
