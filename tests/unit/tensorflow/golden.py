"""The contents of the golden checkpoint of a Keras model, in format 1.

It was written once, by ``golden.write(Path("tests/golden/format-1-keras"))``, and must keep loading. Don't
write it anew: a new format gets a folder of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdrecover.tensorflow as recover

CURSOR = {"epoch": 0, "processed_num": 4, "length": 6, "shuffle": True, "seed": 3}


def network(name: str | None = "net") -> keras.Model:
    """Two layers, one without a name of its own, and batch normalisation."""
    layers = [keras.layers.Dense(2, name="hidden"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential(layers, name=name)
    model.build((None, 3))
    return model


def content(component: Any) -> list[Any]:
    """Each variable's dtype, shape and value."""
    return [(str(each.dtype), tuple(each.shape), each.numpy().tolist()) for each in component.variables]


def trained() -> tuple[keras.Model, keras.optimizers.Optimizer]:
    """A model and its optimizer with values that no generator and no arithmetic has made."""
    keras.utils.clear_session()  # Keras begins anew to number what has no name
    model, optimizer = network(), keras.optimizers.Adam(0.125, name="adam")
    optimizer.build(model.trainable_variables)
    for number, variable in enumerate([*model.variables, *optimizer.variables[2:]]):
        variable.assign(np.arange(np.prod(variable.shape)).reshape(variable.shape) / 4 - number)
    optimizer.iterations.assign(7)
    return model, optimizer


def write(folder: Path) -> None:
    """Write commit 2 of a job."""
    model, optimizer = trained()
    data = recover.elastic_dataset(np.arange(6.0), 2, seed=3)
    checkpoint = recover.Checkpoint(str(folder), keep=1)
    state = recover.TensorFlowKerasState(model, optimizer, data=data, epoch=5, checkpoint=checkpoint)
    state.sync()
    state.commit()
    data.record_batch(2)
    state.commit(durable=True)
    state.flush()
