"""Checkpoints of Keras models that earlier versions wrote must keep loading."""

from __future__ import annotations

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdrecover.tensorflow as recover
from hvdrecover.data.order import SampleOrder
from tests.unit.tensorflow import golden

FORMAT_1 = Path(__file__).parents[2] / "golden" / "format-1-keras"


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(shutil.copytree(FORMAT_1, tmp_path / "root"))


def test_model_optimizer_objects_and_cursor(root: str) -> None:
    expected = [golden.content(component) for component in golden.trained()]
    model, optimizer = golden.network(), keras.optimizers.Adam(name="adam")
    loaded = recover.load(root, model=model, optimizer=optimizer)
    assert [golden.content(model), golden.content(optimizer)] == expected
    assert dict(loaded.objects) == {"epoch": 5, "data": golden.CURSOR}
    order = SampleOrder(6, seed=3)
    order.load_state_dict(loaded.objects["data"])
    assert order.done == 4


def test_a_job_continues_from_it(root: str) -> None:
    expected = golden.content(golden.trained()[0])
    data = recover.elastic_dataset(np.arange(6.0), 2, seed=3)
    adam = keras.optimizers.Adam(name="adam")
    state = recover.TensorFlowKerasState(golden.network(), adam, data=data, epoch=0, checkpoint=root)
    state.sync()
    assert (state.epoch, data.order.done, golden.content(state.model)) == (5, 4, expected)


def test_todays_adapter_still_writes_the_same_tensor_files(tmp_path: Path) -> None:
    golden.write(tmp_path / "root")
    files = list(FORMAT_1.rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        assert (tmp_path / "root" / file.relative_to(FORMAT_1)).read_bytes() == file.read_bytes()
