"""`load`, as far as Keras makes a difference; the rest is tested with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import pytest

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from tests.unit.tensorflow.jobs import (
    content,
    network,
    train_one_step,
)


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


def test_a_model_made_of_its_config_and_its_optimizer_fit_though_keras_calls_their_variables_otherwise(
    root: Path, job: dict[int, Any]
) -> None:
    again = keras.models.model_from_json(network().to_json())
    assert again.layers[0].kernel.path.count("/") < network().layers[0].kernel.path.count("/")
    optimizer = keras.optimizers.Adam()
    recover.load(str(root), model=again, optimizer=optimizer)
    assert (content(again), content(optimizer)) == job[3]
