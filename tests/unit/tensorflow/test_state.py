"""The things that a state keeps, and those that it refuses."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError


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


def test_dropout_is_seeded_anew_at_each_commit_and_the_same_after_a_restore() -> None:
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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", lambda: keras.Sequential([keras.layers.Dense(2)])),
        ("generator", lambda: keras.Sequential([keras.layers.Dense(2)])),
        ("second", lambda: keras.optimizers.Adam()),
    ],
)
def test_what_has_no_variables_yet_is_refused_with_the_remedy(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"state\.{name}: .*build\("):
        recover.TensorFlowState(**{name: value()})


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
@pytest.mark.parametrize(
    "make", [lambda model: recover.TensorFlowState(net=model), recover.TensorFlowKerasState]
)
def test_a_model_whose_layers_are_not_built_is_refused_by_their_names(make: Any) -> None:
    model = Subclass()
    model.build((None, 2))
    assert model.built
    with pytest.raises(ConfigError, match=r"'first', 'block', .*model\(batch\)"):
        make(model)
    model(tf.zeros([1, 2]))
    assert len(make(model)._contents.components()) == 1


def test_a_model_of_built_models_needs_no_call() -> None:
    """A GAN has a ``train_step`` and no ``call``, so Keras can't build it."""
    gan = keras.Model()
    gan.discriminator, gan.generator = a_model(), keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(ConfigError, match=r"state\.model: .*no variables yet"):
        recover.TensorFlowKerasState(gan)
    gan.generator.build((None, 3))
    assert not gan.built
    state = recover.TensorFlowKerasState(gan)
    state.sync()
    before = [each.numpy().tolist() for each in gan.weights]
    gan.generator.weights[0].assign_add(tf.ones([3, 2]))
    state.restore()
    assert [each.numpy().tolist() for each in gan.weights] == before


def test_generators_of_ones_own_are_kept_by_their_states() -> None:
    kept, seeded = tf.random.Generator.from_seed(3), keras.random.SeedGenerator(3)
    state = recover.TensorFlowState(kept=[kept.state], seeded=[seeded.state], batch=0)
    state.sync()
    state.commit()
    first = kept.normal([2]).numpy().tobytes(), keras.random.normal([2], seed=seeded).numpy().tobytes()
    state.restore()
    assert (
        kept.normal([2]).numpy().tobytes(),
        keras.random.normal([2], seed=seeded).numpy().tobytes(),
    ) == first
    state.commit()
    state.batch = 1
    state.commit()
    again = kept.normal([2]).numpy().tobytes(), keras.random.normal([2], seed=seeded).numpy().tobytes()
    assert again[0] != first[0]
    assert again[1] != first[1]
