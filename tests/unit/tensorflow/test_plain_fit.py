"""``model.fit`` of a plain script, in one process: a new ``fit`` continues one that was interrupted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import Past
from hvdrecover.tensorflow import plain_fit
from hvdrecover.tensorflow.plain_fit import Resumable, resumable

SAMPLES, BATCH, EPOCHS = 20, 4, 3
X = np.arange(SAMPLES * 2, dtype=np.float32).reshape(SAMPLES, 2) / SAMPLES
Y = np.arange(SAMPLES) % 2


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Shuffles its samples at the end and at the beginning of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(SAMPLES)

    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __getitem__(self, index: int) -> Any:
        part = self.order[index * BATCH : (index + 1) * BATCH]
        return X[part], Y[part]

    def on_epoch_begin(self) -> None:
        np.random.shuffle(self.order)

    def on_epoch_end(self) -> None:
        random.shuffle(self.order)


def pipeline() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def data_of(x: Any, *, steps: int | None = None) -> Resumable:
    options = dict.fromkeys(("y", "sample_weight", "batch_size", "class_weight"))
    options |= {"x": x, "steps_per_epoch": steps, "shuffle": True, "initial_epoch": 0, "epochs": EPOCHS}
    return resumable(options, lambda: 7, lambda number, function: function())


def test_a_pipeline_skips_to_the_place() -> None:
    data = data_of(pipeline())
    data.go_to(1, 3)
    found = [float(each) for batch in iter(data.get_tf_dataset()) for each in batch[0][:, 0]]
    assert found == X[3 * BATCH :, 0].tolist()
    assert "thrown away" in data.costs
    endless = data_of(pipeline().filter(lambda x, y: True))
    assert (endless.is_counted, endless.steps) == (False, None)


@pytest.mark.parametrize(
    ("x", "steps"),
    [((each for each in [1]), None), (pipeline(), 4), (Batches(), 3)],
    ids=["generator", "pipeline with steps", "PyDataset with steps"],
)
def test_data_without_a_place_are_refused(x: Any, steps: int | None) -> None:
    with pytest.raises(ConfigError):
        data_of(x, steps=steps)


@pytest.fixture
def root_of_later_fits(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that has the fits after it use a checkpoint root."""
    monkeypatch.setattr(plain_fit, "_fits", [])
    monkeypatch.setattr(plain_fit.TensorFlowWorld, "past", Past())
    return lambda: monkeypatch.setenv("HVDRECOVER_CHECKPOINT", str(root))


class InterruptionError(Exception):
    pass


def interrupt(at: int | None) -> keras.callbacks.Callback:
    """Raises after a number of batches; commits do not hold the state of a `LambdaCallback`."""
    count = itertools.count(1)

    def batch_ends(batch: int, logs: Any) -> None:
        if next(count) == at:
            raise InterruptionError

    return keras.callbacks.LambdaCallback(on_train_batch_end=batch_ends)


def a_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(recover.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss, metrics=["accuracy"])
    return model


class TwoOptimizers(keras.Model):  # type: ignore[misc]
    """Trains its last layer also by an optimizer of a model inside, as a GAN trains its discriminator."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.first, self.last = keras.layers.Dense(8, "tanh"), keras.Sequential([keras.layers.Dense(2)])
        self.last.optimizers = {"last": [recover.DistributedOptimizer(keras.optimizers.Adam(0.01))]}
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.compile(recover.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def train_step(self, data: Any) -> Any:
        metrics = super().train_step(data)
        self.last.optimizers["last"][0].apply([tf.reduce_mean(data[0], axis=0)], [self.last.layers[0].bias])
        return metrics


def fit(model: keras.Model, at: int | None, *data: Any, steps: int | None = None) -> keras.callbacks.History:
    """Do the first ``fit`` of a new process."""
    plain_fit._fits.clear()
    plain_fit.TensorFlowWorld.past.functions = 0
    plain_fit.TensorFlowWorld.past.finished.clear()
    size = BATCH if len(data) > 1 else None
    settings = {"batch_size": size, "epochs": EPOCHS, "verbose": 0, "callbacks": [interrupt(at)]}
    given = plain_fit._signature.bind(model, *data, steps_per_epoch=steps, **settings)
    given.apply_defaults()
    options = {name: value for name, value in given.arguments.items() if name != "self"}
    history = plain_fit._resume(model, options)
    assert history is not None
    return history


def weights(model: keras.Model) -> list[bytes]:
    return [each.numpy().tobytes() for each in (*model.weights, *model.optimizer.variables)]


# With steps equal to its length, Keras would begin the iteration of the next epoch earlier.
@pytest.mark.parametrize(
    ("data", "steps"),
    [(lambda: (X, Y), None), (lambda: (X, Y), 4), (lambda: (Batches(),), SAMPLES // BATCH)],
    ids=["arrays", "arrays with steps", "PyDataset with steps"],
)
def test_an_interrupted_fit_is_continued_and_a_finished_one_returns_its_history(
    data: Callable[[], Any], steps: int | None, root_of_later_fits: Callable[[], None]
) -> None:
    undisturbed = a_model()
    expected = fit(undisturbed, None, *data(), steps=steps)
    root_of_later_fits()
    with pytest.raises(InterruptionError):
        fit(a_model(), 8, *data(), steps=steps)
    for _ in range(2):
        model = a_model()
        found = fit(model, None, *data(), steps=steps)
        assert (found.epoch, found.history) == (expected.epoch, expected.history)
        assert weights(model) == weights(undisturbed)


def test_a_finished_fit_leaves_a_py_dataset_as_after_it(root_of_later_fits: Callable[[], None]) -> None:
    root_of_later_fits()
    undisturbed, new = Batches(), Batches()
    fit(a_model(), None, undisturbed)
    fit(a_model(), None, new)  # loads its last commit
    assert new.order.tolist() == undisturbed.order.tolist() != list(range(SAMPLES))


def test_all_optimizers_of_a_model_are_continued(root_of_later_fits: Callable[[], None]) -> None:
    undisturbed, model = TwoOptimizers(), TwoOptimizers()
    fit(undisturbed, None, X, Y)
    root_of_later_fits()
    with pytest.raises(InterruptionError):
        fit(TwoOptimizers(), 8, X, Y)
    fit(model, None, X, Y)
    assert weights(model) == weights(undisturbed)
    mine, theirs = (each.last.optimizers["last"][0].variables for each in (model, undisturbed))
    assert [each.numpy().tobytes() for each in mine] == [each.numpy().tobytes() for each in theirs]
