"""The things that a drill learns of the batches that data sets deal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdrecover.tensorflow as recover
from tests.unit.tensorflow.test_dataset import LENGTH, MAKERS, arrays

ROUNDS = 6  # of 4 samples: LENGTH of them


@pytest.fixture
def drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process is part of a drill; where it writes to."""
    for name, value in {
        "HVDRECOVER_INSTRUMENTS": "hvdrecover.drill.witness",
        "HVDRECOVER_REHEARSAL": "1",
        "HVDRECOVER_DRILL": str(tmp_path / "drill"),
        "HVDRECOVER_CHECKPOINT": str(tmp_path / "root"),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "drill"


def digests(data: recover.ElasticDataset, count: int = ROUNDS) -> list[str]:
    assert data.dealt is not None
    found = [data.dealt.take(1) for _ in range(count)]
    assert None not in found
    return [each for each in found if each is not None]


def test_nothing_looks_at_batches_outside_of_drills() -> None:
    assert recover.elastic_dataset(arrays(), 4).dealt is None


@pytest.mark.parametrize("make", MAKERS)
def test_each_batch_has_a_digest_of_its_own_and_the_same_when_it_is_dealt_again(
    make: Any, drill: Path
) -> None:
    data = make()
    batches = [batch["it"].numpy().tolist() for batch in data]
    first = digests(data)
    assert len(set(first)) == ROUNDS
    assert [batch["it"].numpy().tolist() for batch in data] == batches
    assert digests(data) == first
    assert data.dealt.take(1) is None


@pytest.mark.parametrize("make", MAKERS)
def test_an_iteration_from_the_cursor_on_deals_what_a_whole_one_does_there(make: Any, drill: Path) -> None:
    data = make()
    list(data)
    whole = digests(data)
    abandoned = iter(data)
    next(abandoned)
    data.record_batch(2)
    list(data)
    assert digests(data, ROUNDS - 2) == whole[2:]


def test_other_contents_of_the_same_samples_have_another_digest(drill: Path) -> None:
    def of(first: str) -> list[str]:
        words = np.array([first, *map(str, range(LENGTH - 1))])
        data = recover.elastic_dataset((words, np.arange(LENGTH)), 4, shuffle=False)
        list(data)
        return digests(data)

    one, same, other = of("a"), of("a"), of("b")
    assert one == same
    assert one[0] != other[0] and one[1:] == other[1:]


def test_several_batches_that_are_recorded_at_once_have_one_digest(drill: Path) -> None:
    data = recover.elastic_dataset(arrays(), 4)
    list(data)
    assert data.dealt is not None
    pairs = [data.dealt.take(2) for _ in range(3)]
    assert len(set(pairs)) == 3 and None not in pairs


def test_composite_and_nested_batches_keep_their_structure(drill: Path) -> None:
    def transform(batch: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(batch["it"], [1, tf.size(batch["it"]) - 1])
        return {"ragged": ragged, "pair": (batch["x"], tf.constant(1))}

    data = recover.elastic_dataset(arrays(), 4, transform=transform)
    for batch in data:
        assert isinstance(batch["ragged"], tf.RaggedTensor)
        assert len(batch["pair"]) == 2
    assert data.element_spec["pair"][0].shape.as_list() == [None]
    assert len(digests(data)) == ROUNDS


def trained(*, fit: bool) -> list[Any]:
    """The weights that a model comes to by random operations of all kinds, in a fixed number of steps."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)

    class Noisy(keras.Sequential):  # type: ignore[misc]
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            return super().call(inputs + tf.random.normal(tf.shape(inputs)), training=training)

    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
    model = Noisy(layers)
    model.build((None, 3))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(LENGTH, 3)).astype(np.float32)
    data = recover.elastic_dataset((x, x.sum(1)), 4, transform=lambda x, y: (x * 0.5, y))
    state = recover.TensorFlowKerasState(model, data=data, epoch=0, batch=0)
    state.sync()
    if fit:
        callbacks = recover.fit_callbacks(state, commit_every_batches=3)
        model.fit(data, epochs=2, callbacks=callbacks, shuffle=False, verbose=0)
    else:

        @tf.function  # type: ignore[untyped-decorator]
        def step(images: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(images, training=True)[:, 0] - labels) ** 2)
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        for epoch in range(2):
            data.set_epoch(epoch)
            for number, (images, labels) in enumerate(data):
                step(images, labels)
                data.record_batch()
                if number % 3 == 2:
                    state.commit()
    return [np.asarray(weight).tobytes() for weight in model.weights]


@pytest.mark.parametrize("fit", [False, True])
def test_in_a_drill_a_model_is_trained_to_the_same_bits_and_each_batch_is_told(
    fit: bool, drill: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_drill = trained(fit=fit)
    for name in ("HVDRECOVER_INSTRUMENTS", "HVDRECOVER_REHEARSAL", "HVDRECOVER_CHECKPOINT"):
        monkeypatch.delenv(name)
    assert trained(fit=fit) == in_drill
    (file,) = (drill / "witness").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [line for line in lines if line["what"] == "batch"]
    assert len(told) == 2 * ROUNDS
    assert all(line["inputs"] for line in told)
