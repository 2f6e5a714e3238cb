"""Tensors of a commit as a safetensors file."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy

from hvdrecover.checkpoint import inspection
from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.snapshot import Snapshot
from hvdrecover.errors import CorruptCheckpointError, ExportError
from tests.unit.checkpoint.roots import arena_of, make_store

ID = CommitId(1, 1)
TENSORS = {
    "model": {"a.weight": np.arange(5, dtype="f4"), "a.count": np.array([7], "i8")},
    "ema": {"a.weight": np.arange(5, dtype="f4") / 3, "empty": np.zeros((0, 3), "f4")},
    "optimizer": {"state.0.step": np.array([2.0], "f4")},
}


@pytest.fixture
def storage(root):
    """A commit of two models, an optimizer with options, a plain object and a sampler."""
    arenas = {attribute: arena_of(arrays) for attribute, arrays in TENSORS.items()}
    attributes = {name: {key: {"$tensor": key} for key in arrays} for name, arrays in TENSORS.items()}
    attributes["optimizer"]["lr"] = 0.1
    state = {"attributes": {**attributes, "epoch": 3}, "samplers": {"sampler": {"epoch": 1}}}
    store = make_store(root)
    store.claim_next()
    store.write(Snapshot(ID, arenas, state, 1, {}), rank=0)
    return root


@pytest.fixture
def folder(tmp_path):
    """The folder to export to."""
    folder = tmp_path / "exported"
    folder.mkdir()
    return folder


def written(storage, path, *only, force=False):
    names = inspection.to_safetensors(storage, ID, only, path, force=force)
    assert names == list(only)
    return safetensors.numpy.load_file(path)


@pytest.mark.parametrize(
    ("only", "culprits"),
    [((), "optimizer, epoch, sampler"), (("optimizer",), "optimizer"), (("model", "epoch"), "epoch")],
)
def test_what_holds_more_than_tensors_is_refused(storage, folder, only, culprits):
    with pytest.raises(ExportError, match=rf" {culprits}; .*\.pt .*--only \(model, ema"):
        written(storage, folder / "x.safetensors", *only)
    assert list(folder.iterdir()) == []


def test_an_existing_file_is_replaced_only_if_asked_to(storage, folder):
    path = folder / "x.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(ExportError, match=f"^{path}: .*--force"):
        written(storage, path, "model")
    assert path.read_bytes() == b"mine"
    assert written(storage, path, "model", force=True)["a.count"] == [7]


def test_a_broken_commit_leaves_no_file_and_keeps_the_old_one(storage, folder):
    path = folder / "x.safetensors"
    path.write_bytes(b"mine")
    data = bytearray(storage.read(f"{ID}/model.safetensors"))
    data[-1] ^= 1
    storage.publish(f"{ID}/model.safetensors", bytes(data))
    with pytest.raises(CorruptCheckpointError, match=rf"{ID}/model\.safetensors: .*digest"):
        written(storage, path, "model", force=True)
    assert [(file.name, file.read_bytes()) for file in folder.iterdir()] == [("x.safetensors", b"mine")]
