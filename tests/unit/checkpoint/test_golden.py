"""Checkpoints that earlier versions wrote must keep loading."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from hvdrecover.checkpoint import CommitId
from hvdrecover.checkpoint.storage.local import LocalStorage
from hvdrecover.checkpoint.store import load_newest
from hvdrecover.checkpoint.values import decode
from hvdrecover.data.order import SampleOrder
from hvdrecover.errors import FencedError
from tests.unit.checkpoint import golden
from tests.unit.checkpoint.roots import make_store

FORMAT_1 = Path(__file__).parents[2] / "golden" / "format-1"


def test_its_claim_and_a_job_that_continues_from_it(tmp_path):
    shutil.copytree(FORMAT_1, tmp_path / "root")
    store = make_store(LocalStorage(tmp_path / "root"), job="new")
    claim = store.claims.read(1)
    assert (claim.first, claim.after, claim.acknowledged, claim.start) == (1, 0, True, claim.job)
    with pytest.raises(FencedError, match=f"{claim.job[:8]} on {claim.host}"):
        store.claims.check(1)
    assert store.claim_next() == golden.ID.generation + 1
    later = dataclasses.replace(golden.snapshot(), id=CommitId(2, 121))
    store.write(later, rank=0)
    assert load_newest(store).id == later.id


def test_its_facts_tensors_objects_and_sample_cursor(tmp_path):
    shutil.copytree(FORMAT_1, tmp_path / "root")
    loaded = load_newest(make_store(LocalStorage(tmp_path / "root")))
    assert loaded.id == golden.ID
    assert (loaded.world_size, loaded.finished, loaded.versions["torch"]) == (4, True, "2.13.0")
    assert loaded.state["random"] == {"seed": 42, "states": {}}
    assert loaded.arenas.keys() == golden.TENSORS.keys()
    for name, tensors in golden.TENSORS.items():
        layout = loaded.arenas[name].layout
        assert {spec.name: (spec.dtype, spec.shape) for spec in layout.specs} == {
            key: (dtype, array.shape) for key, (dtype, array) in tensors.items()
        }
        for key, (_, array) in tensors.items():
            assert loaded.arenas[name].bytes_of(key).tobytes() == array.tobytes()
    objects = decode(loaded.state["attributes"]["objects"])
    assert list(objects) == list(golden.OBJECTS)
    assert [key for key, value in golden.OBJECTS.items() if not golden.same(objects[key], value)] == []
    order = SampleOrder(1000, seed=7)
    order.load_state_dict(loaded.state["samplers"]["sampler"])
    assert (order.epoch, order.done) == (2, 64)


def test_todays_writer_still_writes_the_same_tensor_files(tmp_path):
    golden.write(tmp_path / "root")
    for file in FORMAT_1.rglob("*.safetensors"):
        assert (tmp_path / "root" / file.relative_to(FORMAT_1)).read_bytes() == file.read_bytes()
