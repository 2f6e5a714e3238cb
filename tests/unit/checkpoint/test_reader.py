import json
import logging
import math
import re

import pytest

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.checkpoint.root import QUARANTINE, is_quarantined
from hvdrecover.checkpoint.store import load_newest
from hvdrecover.errors import (
    FormatVersionError,
    NoUsableCommitError,
    StorageError,
)
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import Wrapped, assert_is, content, make_snapshot, make_store

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


def flip(storage, path):
    data = bytearray(storage.read(path))
    data[len(data) // 2] ^= 1
    storage.publish(path, bytes(data))


def lose(storage, path):
    storage.remove(path)


DAMAGES = {
    "a truncated file": (truncate, MODEL, r"model\.safetensors: .* 8095 bytes, .* 8096$"),
    "a longer file": (lengthen, MODEL, r"model\.safetensors: .* 8097 bytes, .* 8096$"),
    "a flipped bit": (flip, MODEL, r"model\.safetensors: .*digest"),
    "a missing file": (lose, MODEL, r"model\.safetensors: .*missing"),
    "a missing small file": (lose, f"{NEWEST}/optimizer.safetensors", r"optimizer\.safetensors: .*missing"),
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
