import dataclasses
import json

import pytest

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint import manifest as manifests
from hvdrecover.checkpoint.manifest import FileEntry, Manifest
from hvdrecover.errors import CorruptCheckpointError, FormatVersionError, UnsupportedValueError
from tests.unit.checkpoint.roots import signed

HERE = CommitId(3, 120)
EXAMPLE = Manifest(
    generation=3,
    commit=120,
    time=1700000000.25,
    writer={"host": "node-7", "pid": 42, "rank": 0},
    world_size=4,
    versions={"torch": "2.13.0"},
    files=(FileEntry("model.safetensors", 4096, "0" * 32), FileEntry("optimizer.safetensors", 0, "f" * 32)),
    state={"attributes": {"b": 1, "a": {"$tuple": [1.5, None, True]}, "ü": "\U0001f600"}},
    dataset={"length": 10},
    finished=True,
)


def read(data, expected=HERE):
    return manifests.loads(data, "url", expected)


def fields_of(manifest=EXAMPLE):
    fields = json.loads(manifests.dumps(manifest))
    del fields["digest"]
    return fields


def test_a_state_that_no_reader_would_take_is_not_written(monkeypatch):
    nbytes = len(manifests.dumps(EXAMPLE))
    monkeypatch.setattr(manifests, "MAX_BYTES", nbytes + 100)
    assert len(manifests.dumps(EXAMPLE)) <= manifests.MAX_BYTES
    monkeypatch.setattr(manifests, "MAX_BYTES", nbytes - 1)
    with pytest.raises(UnsupportedValueError, match=rf"^state: .* {nbytes - 1};"):
        manifests.dumps(EXAMPLE)


def test_every_flipped_bit_is_found_or_harmless():
    small = manifests.dumps(dataclasses.replace(EXAMPLE, writer={}, versions={}, state={"x": 1.5}))
    original = read(small)
    for index in range(len(small)):
        for bit in range(8):
            flipped = bytearray(small)
            flipped[index] ^= 1 << bit
            try:
                found = read(bytes(flipped))
            except (CorruptCheckpointError, FormatVersionError):
                continue
            assert found == original, f"bit {bit} of byte {index}"


def test_an_unknown_format_is_an_error_that_names_the_version_and_what_to_install():
    """Written by hand, as another version may: a digest of another kind, and other fields."""
    text = (
        b'{"format": 2, "digest": {"blake3": "ab"}, "commit_id": "g0003-c00000120",'
        b' "versions": {"hvdrecover": "3.1.0"}}'
    )
    with pytest.raises(FormatVersionError, match=r"format 2.*reads format 1.*'hvdrecover>=3\.1\.0'"):
        read(text)
    with pytest.raises(FormatVersionError, match=r"format 99.*--upgrade 'hvdrecover'"):
        read(signed({"format": 99}))


def test_a_field_with_a_default_may_be_missing():
    fields = fields_of()
    del fields["dataset"], fields["finished"]
    assert read(signed(fields)) == dataclasses.replace(EXAMPLE, dataset=None, finished=False)
    del fields["state"]
    with pytest.raises(CorruptCheckpointError, match="state"):
        read(signed(fields))


def test_the_manifest_of_another_commit_is_refused():
    with pytest.raises(CorruptCheckpointError, match=r"^url: .* g0003-c00000120$"):
        read(manifests.dumps(EXAMPLE), CommitId(3, 121))


OUTSIDE = ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.safetensors\n"]
NOT_DATA = ["model", ".safetensors", "MANIFEST.json", "", None, 3]


@pytest.mark.parametrize("name", OUTSIDE + NOT_DATA)
def test_a_file_outside_the_commits_folder_is_refused(name):
    entry = {"name": name, "size": 0, "digest": "0" * 32}
    with pytest.raises(CorruptCheckpointError):
        read(signed({**fields_of(), "files": [entry]}))


def test_a_field_that_this_version_does_not_know_is_ignored():
    fields = fields_of()
    fields["files"][0]["compression"] = None
    assert read(signed({**fields, "note": "new"})) == EXAMPLE
