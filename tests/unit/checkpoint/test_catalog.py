"""The commits that a root holds, and the contents of one of them."""

from __future__ import annotations

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.inspection import catalog
from hvdrecover.checkpoint.manifest import FILE_NAME
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError, UnknownCommitError
from tests.fakes.clock import FakeClock
from tests.unit.checkpoint.roots import content, make_snapshot, make_store

NEWER_FORMAT = b'{"format": 2, "digest": "of another kind"}'


@pytest.fixture
def storage(root):
    """A root with the commits 1 and 2 of generation 1, and 2 of generation 2, at which the run finished."""
    store = make_store(root, clock=FakeClock(start=50.0), keep=9)
    store.claim_next()
    store.write(make_snapshot(1, 1), rank=0)
    store.write(make_snapshot(1, 2), rank=0)
    store.write(make_snapshot(2, 2, finished=True), rank=0)
    return root


def test_commits_are_listed_newest_first_with_their_facts(storage):
    entries = catalog.entries(storage)
    assert [(entry.id.name, entry.state, entry.reason) for entry in entries] == [
        ("g0002-c00000002", "finished", None),
        ("g0001-c00000002", "complete", None),
        ("g0001-c00000001", "complete", None),
    ]
    files = content(storage)
    for entry in entries:
        assert entry.nbytes == sum(len(data) for path, data in files.items() if entry.id.name in path)
        assert (entry.manifest.time, entry.manifest.world_size) == (50.0, 2)


def test_what_is_wrong_with_a_commit_is_its_state(storage):
    storage.publish("g0002-c00000002/QUARANTINE.json", b'{"time": 1, "reason": "a flipped bit"}')
    storage.publish(f"g0001-c00000002/{FILE_NAME}", NEWER_FORMAT)
    storage.publish(f"g0001-c00000001/{FILE_NAME}", b"{")
    storage.publish("g0001-c00000000/model.safetensors", b"half")
    quarantined, newer, broken, incomplete = catalog.entries(storage)
    assert (quarantined.state, quarantined.reason) == ("quarantined", "a flipped bit")
    assert quarantined.manifest is not None
    assert (newer.state, newer.manifest) == ("newer format", None)
    assert "format 2," in newer.reason
    assert (broken.state, broken.manifest) == ("broken", None)
    assert broken.reason.startswith("MANIFEST.json: ")
    assert (incomplete.state, incomplete.reason, incomplete.nbytes) == ("incomplete", None, 4)


@pytest.mark.parametrize("note", [b"", b"[]", b"{}", b"\xff"])
def test_a_quarantine_whose_note_is_damaged_is_still_one(storage, note):
    storage.publish("g0002-c00000002/QUARANTINE.json", note)
    assert catalog.entries(storage)[0].state == "quarantined"


@pytest.mark.parametrize(
    ("names", "fact"),
    [([], "empty"), (["photo.jpg"], r"'photo\.jpg'"), ([FILE_NAME, "model.safetensors"], "above")],
)
def test_what_is_no_root_is_an_error_that_says_what_it_is(root, names, fact):
    for name in names:
        root.publish(name, b"")
    for look in (catalog.entries, lambda storage: catalog.find(storage, None)):
        with pytest.raises(UnknownCommitError, match=fact):
            look(root)


def test_a_commit_is_found_by_its_name_or_its_number_alone(storage):
    assert catalog.find(storage, "g0001-c00000002") == CommitId(1, 2)
    assert catalog.find(storage, "1") == CommitId(1, 1)


def test_without_a_name_it_is_the_newest_complete_one(storage):
    storage.publish("g0003-c00000003/model.safetensors", b"half")
    assert catalog.find(storage, None) == CommitId(2, 2)


def test_a_number_of_several_commits_is_an_error_that_lists_them(storage):
    with pytest.raises(UnknownCommitError, match="number 2: ") as caught:
        catalog.find(storage, "2")
    assert caught.value.candidates == ["g0002-c00000002", "g0001-c00000002"]


@pytest.mark.parametrize("wanted", ["7", "g0001-c00000007", "02", "", "../g0001-c00000001", "²"])
def test_a_commit_that_is_not_there_is_an_error_that_lists_what_is(storage, wanted):
    with pytest.raises(UnknownCommitError, match="g0002-c00000002, g0001-c00000002") as caught:
        catalog.find(storage, wanted)
    assert f"'{wanted}'" in str(caught.value)


def test_a_commits_tensors_and_objects_are_known_without_reading_the_tensors(storage, monkeypatch):
    read = []
    read_into = storage.read_into

    def note(path, buffer, start=0):
        read.append(len(buffer))
        return read_into(path, buffer, start)

    monkeypatch.setattr(storage, "read_into", note)
    found = catalog.look_into(storage, CommitId(2, 2))
    assert [str(spec) for spec in found.layouts["model.safetensors"].specs] == ["F32[1000]", "U8[0]"]
    assert found.attributes == make_snapshot(2, 2).state["attributes"]
    assert (found.samplers, found.entry.state) == ({}, "finished")
    assert set(read) == {8, 4096}


def test_looking_into_a_broken_commit_is_an_error_that_names_the_file(storage):
    storage.publish("g0001-c00000001/model.safetensors", b"short")
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: .* 5 bytes"):
        catalog.look_into(storage, CommitId(1, 1))
    storage.remove("g0001-c00000002/model.safetensors")
    with pytest.raises(CorruptCheckpointError, match=r"g0001-c00000002/model\.safetensors: .*missing"):
        catalog.look_into(storage, CommitId(1, 2))
    storage.publish(f"g0001-c00000002/{FILE_NAME}", NEWER_FORMAT)
    with pytest.raises(FormatVersionError):
        catalog.look_into(storage, CommitId(1, 2))


@pytest.mark.parametrize("part", ["attributes", "samplers"])
@pytest.mark.parametrize("nonsense", [None, 1, [], "x"])
def test_a_state_that_is_nonsense_is_a_corrupt_commit(part, nonsense):
    with pytest.raises(CorruptCheckpointError, match=f"^url: .*{part}"):
        getattr(catalog, part)({part: nonsense}, "url")
