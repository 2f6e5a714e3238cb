"""A commit's model as a ``.keras`` file; files of all kinds are in the tests of checkpoints."""

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
from tests.unit.tensorflow.jobs import X, content, network


def export(root: Path, folder: Path, model_config: str, *options: object) -> tuple[int, Path]:
    """Export with a file of this text, or of this name; return the exit code and the path of the export."""
    config, file = folder / "model.json", folder / "out.keras"
    if model_config.endswith(".keras"):
        config = folder / model_config
    else:
        config.write_text(model_config)
    return main(["export", *map(str, (root, *options, "-o", file, "--model-config", config))]), file


def test_a_keras_file_is_the_model_of_the_commit(
    root: Path, job: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, file = export(root, tmp_path, network().to_json(), 2)
    assert code == 0
    assert capsys.readouterr().out.startswith(f"model of g0001-c00000002: {file}, ")
    model = keras.models.load_model(file)
    assert (content(model), model.compiled) == (job[2][0], False)
    mine = network(seed=9)
    recover.load(str(root), model=mine, commit=2)
    assert np.array_equal(model(X), mine(X))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "out.keras", "root"]


def test_a_keras_file_as_config_gives_the_model_and_not_its_weights(
    root: Path, job: dict[int, Any], tmp_path: Path
) -> None:
    network(seed=9).save(tmp_path / "old.keras")
    code, file = export(root, tmp_path, "old.keras")
    assert (code, content(keras.models.load_model(file))) == (0, job[3][0])


def test_a_config_of_another_model_is_an_error_that_names_the_variables(
    root: Path, job: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(root, tmp_path, network(width=5).to_json())[0] == 1
    errors = capsys.readouterr().err
    assert f" {tmp_path / 'model.json'}:" in errors
    assert re.search(r"/kernel: F32\[3, 4\] .*F32\[3, 5\] ", errors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "root"]


class Unknown(keras.layers.Layer):  # type: ignore[misc]
    """A class that Keras won't look for: it is not registered."""


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("", "(Expecting value"),
        ("{}", " a dict,"),
        (keras.Sequential([keras.Input((3,)), Unknown()]).to_json(), "(Could not locate class 'Unknown'"),
        (keras.Sequential([keras.layers.Dense(2)]).to_json(), "model.build(input_shape)"),
        (json.dumps(keras.optimizers.serialize(keras.optimizers.Adam())), " a Adam,"),
    ],
)
def test_a_config_that_makes_no_model_is_an_error_of_one_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], job: Any, text: str, fact: str
) -> None:
    assert export(root, tmp_path, text)[0] == 1
    errors = capsys.readouterr().err
    assert errors.startswith(f"hvdrecover: {tmp_path / 'model.json'}: ") and fact in errors
    assert (errors.count("\n"), len(errors) < 1000) == (1, True)


def test_lambdas_are_refused_and_not_run(
    root: Path, job: dict[int, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(tmp_path / "trace")
    run = keras.layers.Lambda(lambda x: [x, __import__("pathlib").Path(trace).touch()][0])
    model = keras.Sequential([keras.Input((3,)), run, *network().layers])
    model.save(tmp_path / "old.keras")
    Path(trace).unlink()
    for config in ("old.keras", model.to_json()):
        assert export(root, tmp_path, config)[0] == 1
        assert "Requested the deserialization of a `Lambda` layer" in capsys.readouterr().err
    assert not Path(trace).exists()
