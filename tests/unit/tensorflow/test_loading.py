"""`load`: commits outside a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

import hvdrecover.tensorflow as recover
from hvdrecover.checkpoint.storage import LocalStorage
from hvdrecover.errors import ConfigError, MismatchError
from tests.unit.checkpoint.roots import content as files_of
from tests.unit.tensorflow.jobs import (
    content,
    network,
    train_one_step,
)


def test_the_model_alone_is_loaded_and_the_root_left_as_it_is(root: Path, job: dict[int, Any]) -> None:
    before = files_of(LocalStorage(root))
    model = network(seed=9)
    loaded = recover.load(str(root), model=model)
    assert content(model) == job[3][0]
    assert (loaded.commit.commit, loaded.world_size, loaded.finished) == (3, 1, False)
    assert (loaded.versions["keras"], loaded.not_loaded) == (keras.__version__, ())
    assert files_of(LocalStorage(root)) == before


def test_an_unbuilt_optimizer_is_built_for_the_model_and_continues_to_the_last_bit(
    root: Path, job: dict[int, Any]
) -> None:
    model, optimizer = network(seed=9), keras.optimizers.Adam(0.5)
    recover.load(str(root), model=model, optimizer=optimizer, commit=2)
    assert (content(model), content(optimizer)) == job[2]
    train_one_step(model, optimizer)
    assert (content(model), content(optimizer)) == job[3]


def test_what_has_no_variables_yet_is_refused_with_the_remedy(root: Path, job: dict[int, Any]) -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match=r"^model: .*model\.build\("):
        recover.load(str(root), model=unbuilt, optimizer=keras.optimizers.Adam())
    with pytest.raises(ConfigError, match=r"^ema: .*model\.build\("):
        recover.load(str(root), ema=unbuilt)
    with pytest.raises(ConfigError, match=r"^optimizer: .*optimizer\.build\("):
        recover.load(str(root), optimizer=keras.optimizers.Adam())


def test_a_model_that_does_not_fit_is_an_error_that_names_the_variables_and_nothing_is_loaded(
    root: Path, job: dict[int, Any]
) -> None:
    model = network(width=5)
    untouched = content(model)
    with pytest.raises(MismatchError) as caught:
        recover.load(str(root), model=model)
    name = model.layers[0].kernel.path
    assert f"model.{name}: F32[3, 4] in the commit, F32[3, 5] in the model" in caught.value.differences
    assert content(model) == untouched
    loaded = recover.load(str(root), model=model, strict=False)
    assert list(loaded.not_loaded) == caught.value.differences
    whole = network(seed=9)
    recover.load(str(root), model=whole)
    assert model.layers[-1].bias.numpy().tolist() == whole.layers[-1].bias.numpy().tolist() != [0.0, 0.0]


def test_a_model_made_of_its_config_and_its_optimizer_fit_though_keras_calls_their_variables_otherwise(
    root: Path, job: dict[int, Any]
) -> None:
    again = keras.models.model_from_json(network().to_json())
    assert again.layers[0].kernel.path.count("/") < network().layers[0].kernel.path.count("/")
    optimizer = keras.optimizers.Adam()
    recover.load(str(root), model=again, optimizer=optimizer)
    assert (content(again), content(optimizer)) == job[3]
