"""Commits of TensorFlow jobs as files for other programs, and the commands that look at them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvdrecover.tensorflow as recover
from hvdrecover.cli import main
from tests.unit.tensorflow.jobs import X, content, flip, folder, network


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return written(tmp_path / "model.json", network().to_json())


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def export(*arguments: object) -> int:
    return main(["export", *map(str, arguments)])


def test_a_keras_file_is_the_model_of_the_commit(
    root: Path, job: dict[int, Any], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.keras"
    assert export(root, 2, "-o", file, "--model-config", config) == 0
    assert capsys.readouterr().out.startswith(f"model of g0001-c00000002: {file}, ")
    model = keras.models.load_model(file)
    assert (content(model), model.compiled) == (job[2][0], False)
    mine = network(seed=9)
    recover.load(str(root), model=mine, commit=2)
    assert np.array_equal(model(X), mine(X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "out.keras", "root"]


def test_a_keras_file_of_the_model_will_do_and_its_weights_are_not_used(
    root: Path, job: dict[int, Any], tmp_path: Path
) -> None:
    compiled = network(seed=9)
    compiled.compile(keras.optimizers.SGD(), "mse")
    compiled.save(tmp_path / "old.keras")
    assert export(root, "-o", tmp_path / "new.keras", "--model-config", tmp_path / "old.keras") == 0
    model = keras.models.load_model(tmp_path / "new.keras")
    assert (content(model), model.compiled) == (job[3][0], False)


def test_a_config_of_another_model_is_an_error_that_names_the_variables(
    root: Path, job: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = written(tmp_path / "model.json", network(width=5).to_json())
    assert export(root, "-o", tmp_path / "out.keras", "--model-config", config) == 1
    errors = capsys.readouterr().err
    assert f" {config}:" in errors
    assert re.search(r"/kernel: F32\[3, 4\] .*F32\[3, 5\] ", errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "root"]


class Unknown(keras.layers.Layer):  # type: ignore[misc]
    """A class that Keras won't look for: it is not registered."""


def with_layer(layer: keras.layers.Layer) -> str:
    text: str = keras.Sequential([keras.Input((3,)), layer]).to_json()
    return text


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "(Expecting value"),
        ("[]", "model.to_json()"),
        ("{}", " a dict,"),
        (with_layer(Unknown()), "(Could not locate class 'Unknown'"),
        (keras.Sequential([keras.layers.Dense(2)]).to_json(), "model.build(input_shape)"),
        (json.dumps(keras.optimizers.serialize(keras.optimizers.Adam())), " a Adam,"),
    ],
)
def test_a_config_that_makes_no_model_is_an_error_of_one_line(
    root: Path,
    job: dict[int, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    fact: str,
) -> None:
    config = written(tmp_path / "model.json", text)
    assert export(root, "-o", tmp_path / "out.keras", "--model-config", config) == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"hvdrecover: {config}: ") and fact in errors
    assert (errors.count("\n"), len(errors) < 1000) == (1, True)


def test_lambdas_are_refused_and_not_run(
    root: Path, job: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace")
    run = keras.layers.Lambda(lambda x: [x, __import__("pathlib").Path(trace).touch()][0])
    model = keras.Sequential([keras.Input((3,)), run, *network().layers])
    model.save(tmp_path / "old.keras")
    written(tmp_path / "old.json", model.to_json())
    Path(trace).unlink()
    for config in ("old.keras", "old.json"):
        assert export(root, "-o", tmp_path / "new.keras", "--model-config", tmp_path / config) == 1
        assert "Requested the deserialization of a `Lambda` layer" in capsys.readouterr().err
    assert not Path(trace).exists()


def test_a_file_is_replaced_only_if_asked_to_and_never_by_a_broken_commit(
    root: Path, job: dict[int, Any], config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.keras"
    file.write_bytes(b"mine")
    options = "-o", file, "--model-config", config
    assert export(root, *options) == 1
    assert re.search(f"{file}: .*--force", capsys.readouterr().err)
    flip(folder(root, 3) / "model.safetensors")
    assert export(root, *options, "--force") == 1
    assert re.search(r"model\.safetensors: .*digest", capsys.readouterr().err)
    assert file.read_bytes() == b"mine"
    assert export(root, 2, *options, "--force") == 0
    assert content(keras.models.load_model(file)) == job[2][0]
