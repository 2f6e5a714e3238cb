"""The commands' view of a root, and commits as text. tests/unit/test_cli.py tests the commands themselves."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import safetensors.numpy

from hvdrecover.checkpoint import Best, CommitId, Keep, inspection
from hvdrecover.checkpoint.manifest import FILE_NAME, Snapshot
from hvdrecover.checkpoint.values import encode
from hvdrecover.errors import (
    ConfigError,
    CorruptCheckpointError,
    ExportError,
    StorageError,
    UnknownCommitError,
)
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import CODES, arena_of, content, flip, make_snapshot, make_store

CLOCK = FakeClock(start=1000.0)
NEWER_FORMAT = b'{"format": 2, "digest": "of another kind"}'


def ignore(count):
    pass


@pytest.fixture
def storage(root):
    """A root with the commits 1 and 2 of generation 1, and 2 of generation 2, at which the run finished."""
    store = make_store(root, clock=FakeClock(start=50.0), keep=9)
    store.claim_next()
    for snapshot in (make_snapshot(1, 1), make_snapshot(1, 2), make_snapshot(2, 2, finished=True)):
        store.write(snapshot, rank=0)
    return root


# -- list and find -------------------------------------------------------------------------------------


def test_commits_are_listed_newest_first_with_their_facts(storage):
    entries = inspection.look(storage).commits
    assert [(each.commit, each.state, each.reason, each.time, each.world_size) for each in entries] == [
        ("g0002-c00000002", "finished", None, 50.0, 2),
        ("g0001-c00000002", "complete", None, 50.0, 2),
        ("g0001-c00000001", "complete", None, 50.0, 2),
    ]
    files = content(storage)
    for entry in entries:
        assert entry.bytes == sum(len(data) for path, data in files.items() if entry.commit in path)


@pytest.mark.parametrize(
    ("note", "reason"), [(b'{"time": 1, "reason": "a flipped bit"}', "a flipped bit"), (b"[\xff", "the note")]
)
def test_what_is_wrong_with_a_commit_is_its_state(storage, note, reason):
    storage.publish("g0002-c00000002/QUARANTINE.json", note)
    storage.publish(f"g0001-c00000002/{FILE_NAME}", NEWER_FORMAT)
    storage.publish(f"g0001-c00000001/{FILE_NAME}", b"{")
    storage.publish("g0001-c00000000/model.safetensors", b"half")
    quarantined, newer, broken, incomplete = inspection.entries(storage)
    assert quarantined.state == "quarantined" and quarantined.reason.startswith(reason)
    assert newer.state == "newer format" and "format 2," in newer.reason
    assert broken.state == "broken" and broken.reason.startswith("MANIFEST.json: ")
    assert (incomplete.state, incomplete.reason, incomplete.bytes) == ("incomplete", None, 4)


def test_a_commit_is_found_by_its_name_or_its_number_and_else_is_the_newest_complete_one(storage):
    storage.publish("g0003-c00000003/model.safetensors", b"half")
    assert inspection.find(storage, "g0001-c00000002") == CommitId(1, 2)
    assert inspection.find(storage, "1") == CommitId(1, 1)
    assert inspection.find(storage, None) == CommitId(2, 2)
    with pytest.raises(UnknownCommitError, match="number 2: ") as caught:
        inspection.find(storage, "2")
    assert caught.value.candidates == ["g0002-c00000002", "g0001-c00000002"]


@pytest.mark.parametrize("wanted", ["7", "g0001-c00000007", "02", "", "../g0001-c00000001", "²"])
def test_a_commit_that_is_not_there_is_an_error_that_lists_what_is(storage, wanted):
    with pytest.raises(UnknownCommitError, match="g0002-c00000002, g0001-c00000002") as caught:
        inspection.find(storage, wanted)
    assert f"'{wanted}'" in str(caught.value)


# -- look into one -------------------------------------------------------------------------------------


def test_a_commits_tensors_and_objects_are_known_without_reading_the_tensors(storage, monkeypatch):
    read = []
    read_into = storage.read_into

    def note(path, buffer, start=0):
        read.append(len(buffer))
        return read_into(path, buffer, start)

    monkeypatch.setattr(storage, "read_into", note)
    found = inspection.look_into(storage, CommitId(2, 2))
    assert [(each["dtype"], each["shape"]) for each in found.files[0]["tensors"]] == [
        ("F32", (1000,)),
        ("U8", (0,)),
    ]
    assert found.attributes == make_snapshot(2, 2).state["attributes"]
    assert (found.samplers, found.state) == ({}, "finished")
    assert set(read) == {8, 4096}


# -- verify --------------------------------------------------------------------------------------------


def test_a_commit_that_a_job_deletes_meanwhile_is_left_out(storage):
    entries = inspection.entries(storage)
    storage.delete("g0001-c00000002")
    verified = inspection.verify_all(storage, entries, ignore)
    assert [each.commit for each in verified] == ["g0002-c00000002", "g0001-c00000001"]


def test_storage_that_fails_says_nothing_about_the_commit(storage, monkeypatch):
    def away(path, buffer, start=0):
        raise StorageError(path, "the network is down")

    (newest, *_) = inspection.entries(storage)
    monkeypatch.setattr(storage, "read_into", away)
    with pytest.raises(StorageError, match="network"):
        inspection.verify(storage, newest, ignore)


# -- prune ---------------------------------------------------------------------------------------------


def test_a_metric_that_no_commit_has_is_an_error(storage):
    with pytest.raises(ConfigError, match=r"^--keep-best: .*'loss'"):
        inspection.plan_pruning(storage, Keep(1, best=Best("loss")), CLOCK)


def test_the_only_commit_that_is_intact_is_not_deleted(storage):
    flip(storage, "g0002-c00000002/model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"g0002-c00000002: model\.safetensors: .*digest"):
        inspection.check_one_is_intact(storage, inspection.plan_pruning(storage, Keep(1), CLOCK), ignore)
    for keep in (2, 3):
        inspection.check_one_is_intact(storage, inspection.plan_pruning(storage, Keep(keep), CLOCK), ignore)


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
        plan = inspection.plan_pruning(root, Keep(2), CLOCK)
        assert {entry.state for entry in plan.untouched} <= {"incomplete"}
        inspection.prune(root, plan)
    thread.join()
    assert failures == []
    assert store.events.of("not_deleted") == []
    verified = inspection.verify_all(root, inspection.entries(root), ignore)
    assert [each.number for each in verified][:2] == [39, 38]
    assert all(each.intact for each in verified)


# -- export --------------------------------------------------------------------------------------------

TENSORS = {
    "model": {"a.weight": np.arange(5, dtype="f4"), "a.count": np.array([7], "i8")},
    "ema": {"a.weight": np.arange(5, dtype="f4") / 3, "empty": np.zeros((0, 3), "f4")},
    "optimizer": {"state.0.step": np.array([2.0], "f4")},
}


@pytest.fixture
def exportable(root):
    """A commit of two models, an optimizer with options, a plain object and a sampler."""
    arenas = {attribute: arena_of(arrays) for attribute, arrays in TENSORS.items()}
    attributes = {name: {key: {"$tensor": key} for key in arrays} for name, arrays in TENSORS.items()}
    attributes["optimizer"]["lr"] = 0.1
    state = {"attributes": {**attributes, "epoch": 3}, "samplers": {"sampler": {"epoch": 1}}}
    store = make_store(root)
    store.claim_next()
    store.write(Snapshot(CommitId(1, 1), arenas, state, 1, {}), rank=0)
    return root


@pytest.fixture
def folder(tmp_path):
    """The folder to export to."""
    folder = tmp_path / "exported"
    folder.mkdir()
    return folder


def written(storage, path, *only, force=False):
    names = inspection.to_safetensors(storage, CommitId(1, 1), only, path, force=force)
    assert names == list(only)
    return safetensors.numpy.load_file(path)


@pytest.mark.parametrize(
    ("only", "culprits"),
    [((), "optimizer, epoch, sampler"), (("optimizer",), "optimizer"), (("model", "epoch"), "epoch")],
)
def test_what_holds_more_than_tensors_is_refused(exportable, folder, only, culprits):
    with pytest.raises(ExportError, match=rf" {culprits}; .*\.pt .*--only \(model, ema"):
        written(exportable, folder / "x.safetensors", *only)
    assert list(folder.iterdir()) == []


def test_an_existing_file_is_replaced_only_if_asked_to(exportable, folder):
    path = folder / "x.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(ExportError, match=f"^{path}: .*--force"):
        written(exportable, path, "model")
    assert path.read_bytes() == b"mine"
    assert written(exportable, path, "model", force=True)["a.count"] == [7]


def test_a_broken_commit_leaves_no_file_and_keeps_the_old_one(exportable, folder):
    path = folder / "x.safetensors"
    path.write_bytes(b"mine")
    flip(exportable, "g0001-c00000001/model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"g0001-c00000001/model\.safetensors: .*digest"):
        written(exportable, path, "model", force=True)
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("x.safetensors", b"mine")]


# -- diff ------------------------------------------------------------------------------------------------


A, B = CommitId(1, 1), CommitId(1, 2)


def measured(a, b, code=None):
    """Return how many elements differ, how many of them are not finite, and the largest difference."""
    a, b = np.atleast_1d(np.asarray(a)), np.atleast_1d(np.asarray(b))
    return inspection.measure(
        code or CODES[a.dtype], a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    )


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (np.array([1.0, -4.0, 2.0]), np.array([1.5, -4.0, 0.0]), (2, 0, 2.0)),
        (np.array([2.0, math.nan, math.nan]), np.array([3.0, 1.0, math.nan]), (2, 1, 1.0)),
        (np.array([2.0, math.inf]), np.array([3.0, -math.inf]), (2, 1, 1.0)),
        (np.array([0.0]), np.array([-0.0]), (1, 0, 0.0)),
        (np.array([2**63 - 1, -(2**63)]), np.array([2**63 - 2, 2**63 - 1]), (2, 0, 2.0**64)),
        (np.array([-128], "i1"), np.array([127], "i1"), (1, 0, 255)),
        (np.array([True, False]), np.array([False, False]), (1, 0, 1)),
        (np.array([3 + 4j], "c8"), np.array([0], "c8"), (1, 0, 5.0)),
        (np.array([-60000], "f2"), np.array([60000], "f2"), (1, 0, 120000)),
        (np.zeros(0), np.zeros(0), (0, 0, 0.0)),
    ],
)
def test_elements_that_differ_are_counted_and_measured(a, b, expected):
    assert measured(a, b) == expected


@pytest.mark.parametrize(
    ("code", "items", "one", "two", "expected"),
    [
        ("BF16", "u2", 0x3F80, 0x4000, (1, 0, 1.0)),
        ("F8_E4M3", "u1", 0x7E, 0x81, (1, 0, 448 + 2**-9)),
        ("F8_E4M3", "u1", 0x7F, 0x40, (1, 1, 0.0)),
        ("F8_E5M2", "u1", 0x7B, 0x81, (1, 0, 57344 + 2**-16)),
        ("F8_E5M2", "u1", 0x7C, 0x40, (1, 1, 0.0)),
    ],
)
def test_types_that_numpy_lacks_are_compared_by_value(code, items, one, two, expected):
    assert measured(np.array([one, two], items), np.array([two, two], items), code) == expected


def test_a_tensor_of_many_chunks_is_compared_whole(monkeypatch):
    monkeypatch.setattr(inspection, "CHUNK", 7)
    a = np.linspace(-1, 1, 100)
    b = a.copy()
    b[[3, 50, 99]] += [0.5, 0.25, 0.125]
    b[20] = math.nan
    assert measured(a, b) == (4, 1, 0.5)


# -- commits -------------------------------------------------------------------------------------------


def snapshot(commit, tensors, **objects):
    arenas = {attribute: arena_of(arrays) for attribute, arrays in tensors.items()}
    state = {"attributes": objects, "samplers": {"sampler": {"epoch": commit.commit}}, "random": {"seed": 5}}
    return Snapshot(commit, arenas, state, 2, {"torch": "2.13.0"})


@pytest.fixture
def two(root):
    store = make_store(root)
    store.claim_next()
    one = np.ones(4, "f4")
    leapt = np.array([1, 1, np.nan, 1], "f4")
    before = dict.fromkeys(("same", "moved", "leapt", "gone", "wide"), one)
    after = {"same": one, "moved": one + 8, "leapt": leapt, "new": one, "wide": one.astype("f8")}
    config = {"rate": 0.1, "name": "a"}
    store.write(snapshot(A, {"model": before, "extra": {"x": one}}, epoch=1, config=config), rank=0)
    config = {"rate": 0.2, "name": "a", "more": None}
    store.write(snapshot(B, {"model": after}, epoch=2, config=config), rank=0)
    return root


def test_the_difference_of_two_commits(two):
    before, told = content(two), []
    found = inspection.compare(two, A, B, told.append)
    assert [(each.name, each.change, each.largest) for each in found.differences] == [
        ("extra.x", "removed F32[4]", None),
        ("model.gone", "removed F32[4]", None),
        ("model.leapt", "1 of 4 elements, 1 not finite", 0.0),
        ("model.moved", "4 of 4 elements", 8.0),
        ("model.new", "added F32[4]", None),
        ("model.wide", "F32[4] → F64[4]", None),
        ("epoch", "1 → 2", None),
        ("config.rate", "0.1 → 0.2", None),
        ("sampler.epoch", "1 → 2", None),
        ("config.more", "(none) → None", None),
    ]
    assert found.unchanged == 1
    assert sum(told) == sum(len(data) for path, data in before.items() if path.endswith(".safetensors"))
    assert content(two) == before


# -- plain objects as text -----------------------------------------------------------------------------


def test_a_value_reads_as_in_python():
    value = {"rate": 0.1, "tuple": (1, (2,)), "keys": {1: "ü"}, "bytes": b"\xff", "array": np.arange(2)}
    assert inspection.text(encode(value, "")) == repr(value)
    unknown = {"$enum": ["train:Phase", "TRAIN"]}
    assert inspection.text(unknown) == repr(unknown)


def test_differences_name_the_way_to_each():
    a = {"group": [{"lr": 0.1, "betas": {"$tuple": [0.9, 0.99]}}], "keys": {"$dict": [[1, "x"], [2, "y"]]}}
    b = {"group": [{"lr": 0.2, "betas": {"$tuple": [0.9, 0.9]}}], "keys": {"$dict": [[1, "x"], [3, "y"]]}}
    assert inspection.differences(a, b) == {
        "group[0].lr": ("0.1", "0.2"),
        "group[0].betas": ("(0.9, 0.99)", "(0.9, 0.9)"),
        "keys[2]": ("'y'", "(none)"),
        "keys[3]": ("(none)", "'y'"),
    }
    assert inspection.differences({"a": 1}, {"a": True}) == {"a": ("1", "True")}
    # Tensors that come and go are listed by the comparison of tensors.
    assert inspection.differences({"w": {"$tensor": "w"}, "n": 1}, {"v": [{"$tensor": "v"}], "n": 1}) == {}
