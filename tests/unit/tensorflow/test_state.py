"""The things that a state keeps, those that it refuses, and commits that are loaded outside a job."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError, UnsupportedTensorError
from hvdrecover.tensorflow.variables import mean_the_same
from tests.unit.tensorflow.jobs import content, network, train_one_step


def a_model() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.build((None, 3))
    return model


def test_variables_of_both_kinds_objects_and_tensors_are_rolled_back() -> None:
    variables = [tf.Variable([1.0, 2.0]), keras.Variable([3.0]), tf.Variable(4, dtype=tf.int64)]
    module = tf.Module()
    module.weight = tf.Variable([6.0])
    state = recover.TensorFlowState(
        variables, batch=0, history=[], tensor=tf.constant([5.0]), module=module, single=tf.Variable(7.0)
    )
    state.sync()
    for variable in (*variables, module.weight, state.single):
        variable.assign(tf.zeros_like(tf.convert_to_tensor(variable)))
    state.batch = 7
    state.history.append(1)
    state.tensor = tf.constant([0.0])
    state.restore()
    assert [variable.numpy().tolist() for variable in variables] == [[1.0, 2.0], [3.0], 4]
    assert (module.weight.numpy().tolist(), float(state.single)) == ([6.0], 7.0)
    assert (state.batch, state.history, state.tensor.numpy().tolist()) == (0, [], [5.0])


def test_variables_in_dicts_and_nested_lists_are_rolled_back_in_place() -> None:
    first, second, third, last = variables = [tf.Variable(float(number)) for number in range(4)]
    state = recover.TensorFlowState(flat={"b": last, "a": [third]}, nested=[[first], ({"c": second},)])
    state.sync()
    for variable in variables:
        variable.assign(9.0)
    state.restore()
    assert [float(variable) for variable in variables] == [0.0, 1.0, 2.0, 3.0]
    found = [state.nested[0][0], state.nested[1][0]["c"], state.flat["a"][0], state.flat["b"]]
    assert all(mine is kept for mine, kept in zip(variables, found, strict=True))


@dataclass
class Average:
    weight: Any


@pytest.mark.parametrize("mix", [lambda each: [each, 1.0], lambda each: {"a": [each], "b": ""}, Average])
def test_a_variable_among_other_values_is_refused(mix: Any) -> None:
    with pytest.raises(UnsupportedTensorError, match=r"^state\.mixed\.\S+: .*among other values"):
        recover.TensorFlowState(mixed=mix(tf.Variable(1.0))).commit()


def test_dropout_has_another_seed_after_each_commit_and_the_same_after_a_restore() -> None:
    model = a_model()
    state = recover.TensorFlowKerasState(model, batch=0)
    state.sync()
    x = tf.ones([4, 3])

    def draws() -> list[bytes]:
        return [model(x, training=True).numpy().tobytes() for _ in range(2)]

    first = draws()
    state.restore()
    assert draws() == first
    state.batch += 1  # a commit at which nothing has changed continues with the stream
    state.commit()
    assert draws() != first


def test_generators_in_the_state_are_kept() -> None:
    kept, seeded = tf.random.Generator.from_seed(3), keras.random.SeedGenerator(3)
    state = recover.TensorFlowState(kept=[kept.state], seeded=[seeded.state], batch=0)
    state.sync()
    state.commit()

    def draws() -> list[bytes]:
        return [each.numpy().tobytes() for each in (kept.normal([2]), keras.random.normal([2], seed=seeded))]

    first = draws()
    state.restore()
    assert draws() == first
    state.commit()
    assert not set(draws()) & set(first)


@pytest.mark.parametrize("make", [lambda: keras.Sequential([keras.layers.Dense(2)]), keras.optimizers.Adam])
def test_a_component_without_variables_is_refused_with_the_remedy(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^state\.second: .*build\("):
        recover.TensorFlowState(second=make())
    with pytest.raises(ConfigError, match=r"^ema: .*build\("):
        recover.load(str(tmp_path), ema=make())


class Subclass(keras.Model):  # type: ignore[misc]
    """A model without a ``build`` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(2, name="first")
        self.blocks = [keras.Sequential([keras.layers.Dense(2)], name="block")]
        self.add = keras.layers.Add()
        self.flatten = keras.layers.Flatten()  # has no variables

    def call(self, x: Any) -> Any:
        return self.add([self.blocks[0](self.first(x)), x])


@pytest.mark.filterwarnings("ignore:`build\\(\\)` was called")
def test_a_model_whose_layers_are_not_built_is_refused_by_their_names() -> None:
    model = Subclass()
    model.build((None, 2))
    assert model.built
    for make in (lambda: recover.TensorFlowState(net=model), lambda: recover.TensorFlowKerasState(model)):
        with pytest.raises(ConfigError, match=r"'first', 'block', .*model\(batch\)"):
            make()
    model(tf.zeros([1, 2]))
    recover.TensorFlowKerasState(model)


def test_a_model_of_built_models_needs_no_call() -> None:
    """A GAN has a ``train_step`` and no ``call``, so Keras cannot build it."""
    gan = keras.Model()
    gan.discriminator, gan.generator = a_model(), keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match=r"state\.model: .*no variables yet"):
        recover.TensorFlowKerasState(gan)
    gan.generator.build((None, 3))
    assert not gan.built
    state = recover.TensorFlowKerasState(gan)
    state.sync()
    before = content(gan)
    gan.generator.weights[0].assign_add(tf.ones([3, 2]))
    state.restore()
    assert content(gan) == before


def test_an_unbuilt_optimizer_is_built_for_the_model_and_continues_to_the_last_bit(
    root: Path, job: dict[int, Any]
) -> None:
    model, optimizer = network(seed=9), keras.optimizers.Adam(0.5)
    recover.load(str(root), model=model, optimizer=optimizer, commit=2)
    assert (content(model), content(optimizer)) == job[2]
    train_one_step(model, optimizer)
    assert (content(model), content(optimizer)) == job[3]


def test_a_model_made_of_its_config_fits_though_keras_calls_its_variables_otherwise(
    root: Path, job: dict[int, Any]
) -> None:
    again = keras.models.model_from_json(network().to_json())
    assert again.layers[0].kernel.path.count("/") < network().layers[0].kernel.path.count("/")
    optimizer = keras.optimizers.Adam()
    recover.load(str(root), model=again, optimizer=optimizer)
    assert (content(again), content(optimizer)) == job[3]


MODEL = ["net/dense/kernel", "net/dense/bias", "net/dense_1/kernel"]
ADAM = ["adam/iteration", "adam/net_dense_kernel_momentum", "adam/net_dense_1_kernel_momentum"]


@pytest.mark.parametrize(
    ("same", "stored", "mine"),
    [
        (True, MODEL, ["net_1/dense_2/kernel", "net_1/dense_2/bias", "net_1/dense_3/kernel"]),
        (True, MODEL, ["dense/kernel", "dense/bias", "dense_1/kernel"]),
        (True, ADAM, ["adam/iteration", "adam/dense_7_kernel_momentum", "adam/dense_8_kernel_momentum"]),
        (False, MODEL, MODEL[:2]),
        (False, MODEL, ["net/dense/bias", "net/dense/kernel", "net/dense_1/kernel"]),
        (False, MODEL, ["other/dense/kernel", "other/dense/bias", "other/dense_1/kernel"]),
        (False, ["a/kernel", "b/kernel"], ["net/a/kernel", "other/b/kernel"]),
        (False, ADAM, ["adam/iteration", "adam/dense_bias_momentum", "adam/dense_1_kernel_momentum"]),
    ],
)
def test_names_that_keras_gives_the_same_variables_and_others(
    same: bool, stored: list[str], mine: list[str]
) -> None:
    assert (mean_the_same(stored, mine), mean_the_same(mine, stored)) == (same, same)


# Commit 2 of a job with `golden()`, `epoch=5` and a data set of 6 samples. It must keep loading, and is never
# written again: a new format gets another folder.
FORMAT_1 = Path(__file__).parents[2] / "golden" / "format-1-keras"
CURSOR = {"epoch": 0, "processed_num": 4, "length": 6, "shuffle": True, "seed": 3}


def golden_network() -> keras.Model:
    """A named layer, one that Keras names, and batch normalization."""
    layers = [keras.layers.Dense(2, name="hidden"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers, name="net")
    model.build((None, 3))
    return model


def golden() -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """A model and its optimizer with values that no generator and no arithmetic has made."""
    model, optimizer = golden_network(), keras.optimizers.Adam(0.125, name="adam")
    optimizer.build(model.trainable_variables)
    for number, variable in enumerate([*model.variables, *optimizer.variables[2:]]):
        variable.assign(np.arange(np.prod(variable.shape)).reshape(variable.shape) / 4 - number)
    optimizer.iterations.assign(7)
    return model, optimizer


def test_model_optimizer_objects_and_cursor_of_the_golden_checkpoint(tmp_path: Path) -> None:
    root = str(shutil.copytree(FORMAT_1, tmp_path / "root"))
    expected = [content(component) for component in golden()]
    model, optimizer = golden_network(), keras.optimizers.Adam(name="adam")
    loaded = recover.load(root, model=model, optimizer=optimizer)
    assert [content(model), content(optimizer)] == expected
    assert dict(loaded.objects) == {"epoch": 5, "data": CURSOR}
