"""The guard in TensorFlow: structure, and parameters that are not finite."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdrecover.state.adapter import Entry
from hvdrecover.tensorflow.averaging import is_finite, sums_of
from hvdrecover.tensorflow.variables import named, without_numbers


def describe(component: Any) -> list[Entry]:
    """Return names, shapes and dtypes of a component's variables, and an optimizer's configuration.

    Names go without the numbers that Keras gives: these depend on earlier layers of the process.
    """
    entries = [
        Entry(
            f".{number}.{without_numbers(name)}",
            f"{variable.dtype.name}{list(variable.shape)}{', trained' if variable.trainable else ''}",
        )
        for number, (name, variable) in enumerate(named(component).items())
    ]
    if isinstance(component, keras.optimizers.Optimizer):
        entries.insert(0, Entry("", f"a {type(component).__name__}"))
        entries += [
            Entry(
                f".{name}",
                json.dumps(value, default=str, sort_keys=True),
                setting=True,
                # Other settings are attributes of the optimizer, which a commit does not hold.
                stored=name == "learning_rate" and isinstance(value, float),
            )
            for name, value in sorted(component.get_config().items())
            if name != "name"
        ]
    return entries


def not_finite(variables: Mapping[str, tf.Variable]) -> list[str]:
    """Return names of the variables that hold NaN or infinity."""
    floats = {name: each for name, each in variables.items() if each.dtype.is_floating}
    if not floats or np.isfinite(sums_of(list(floats.values())).numpy()).all():
        return []
    return [name for name, each in floats.items() if not is_finite(each)]
