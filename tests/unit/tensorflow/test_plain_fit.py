"""``model.fit`` of a plain script, in one process: a new ``fit`` continues one that was interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow import plain_fit
from hvdrecover.tensorflow.fit_data import Resumable, resumable

SAMPLES, BATCH, EPOCHS = 20, 4, 3
X = np.arange(SAMPLES * 2, dtype=np.float32).reshape(SAMPLES, 2) / SAMPLES
Y = np.arange(SAMPLES) % 2


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return SAMPLES // BATCH

    def __getitem__(self, index: int) -> Any:
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part], Y[part]


def pipeline(**shuffle: Any) -> tf.data.Dataset:
    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return (data.shuffle(SAMPLES, **shuffle) if shuffle else data).batch(BATCH)


def data_of(x: Any, y: Any = None, *, steps: int | None = None, shuffle: bool = True) -> Resumable:
    options = {"y": y, "sample_weight": None, "batch_size": BATCH if y is not None else None}
    options |= {"steps_per_epoch": steps, "class_weight": None, "shuffle": shuffle}
    return resumable(x, options, EPOCHS, lambda: 7)


def taken(data: Resumable, count: int | None = None) -> list[float]:
    """The first number of each sample of the next iteration."""
    data.on_epoch_begin()
    found = [float(each) for batch in data.get_tf_dataset().take(count or -1) for each in batch[0][:, 0]]
    data.on_epoch_end()
    return found


FORMS = {
    "arrays": lambda: data_of(X, Y),
    "arrays in their order": lambda: data_of(X, Y, shuffle=False),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_of_a_new_process_continue_at_any_place(form: str) -> None:
    data, epochs = FORMS[form](), []
    for epoch in range(EPOCHS):
        data.go_to(epoch, 0)
        epochs.append(taken(data))
    assert all(sorted(each) == sorted(X[:, 0].tolist()) for each in epochs)
    new = FORMS[form]()
    new.go_to(2, 3)
    assert taken(new) == epochs[2][3 * BATCH :]


def test_a_pipeline_skips_to_the_place() -> None:
    data = data_of(pipeline())
    data.go_to(1, 3)
    assert [float(each) for batch in iter(data.get_tf_dataset()) for each in batch[0][:, 0]] == X[
        12:, 0
    ].tolist()
    assert "thrown away" in data.costs


def test_an_epoch_of_unknown_length_and_one_of_a_py_dataset_have_no_places_inside() -> None:
    data = data_of(pipeline().filter(lambda x, y: True))
    assert (data.is_counted, data.steps) == (False, None)
    data = data_of(Batches(workers=2))
    assert (data.is_counted, data.steps) == (False, SAMPLES // BATCH)
    data.on_epoch_begin()
    next(iter(data.get_tf_dataset()))  # and a fault
    assert sorted(taken(data)) == sorted(X[:, 0].tolist())


@pytest.mark.parametrize(
    ("data", "steps"),
    [([(each for each in [1])], None), ([pipeline()], 4), ([Batches()], 3), ([X, Y], 3)],
    ids=["generator", "pipeline with steps", "PyDataset with steps", "arrays with steps"],
)
def test_data_without_a_place_are_refused(data: list[Any], steps: int | None) -> None:
    with pytest.raises(ConfigError):
        data_of(*data, steps=steps)


# -- a whole fit ---------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin the script of a new process; one rank is enough."""
    monkeypatch.setattr(plain_fit, "_fits", [])
    monkeypatch.setattr(plain_fit.TensorFlowWorld.past, "functions", 0)
    monkeypatch.setattr(plain_fit.TensorFlowWorld.past, "finished", set())
    yield


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


def fit(model: keras.Model, at: int | None, *data: Any, epochs: int = EPOCHS) -> keras.callbacks.History:
    """Do the first ``fit`` of a new process."""
    plain_fit._fits.clear()
    plain_fit.TensorFlowWorld.past.functions = 0
    plain_fit.TensorFlowWorld.past.finished.clear()
    size = BATCH if len(data) > 1 else None
    settings = {"batch_size": size, "epochs": epochs, "verbose": 0, "callbacks": [interrupt(at)]}
    given = plain_fit._signature.bind(model, *data, **settings)
    given.apply_defaults()
    options = {name: value for name, value in given.arguments.items() if name != "self"}
    history = plain_fit._resume(model, options)
    assert history is not None
    return history


def weights(model: keras.Model) -> list[bytes]:
    return [each.numpy().tobytes() for each in (*model.weights, *model.optimizer.variables)]


def test_an_interrupted_fit_is_continued_and_a_finished_one_returns_its_history(
    root: Path, monkeypatch: pytest.MonkeyPatch, started: None
) -> None:
    undisturbed = a_model()
    expected = fit(undisturbed, None, X, Y)
    monkeypatch.setenv("HVDRECOVER_CHECKPOINT", str(root))
    with pytest.raises(InterruptionError):
        fit(a_model(), 8, X, Y)
    for _ in range(2):
        model = a_model()
        found = fit(model, None, X, Y)
        assert (found.epoch, found.history) == (expected.epoch, expected.history)
        assert weights(model) == weights(undisturbed)
