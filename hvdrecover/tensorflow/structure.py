"""The structure of models and optimizers, which ranks that train together must have in common."""

from __future__ import annotations

import json
from typing import Any

import keras

from hvdrecover.elastic.interfaces import Entry
from hvdrecover.tensorflow.variables import named, without_numbers


def of_component(component: Any) -> list[Entry]:
    """Names, shapes and dtypes of its variables, and which are trained; an optimizer's configuration.

    Names go without the numbers that Keras gives, which depend on what a process has made before.
    """
    entries = [
        Entry(
            f".{number}.{without_numbers(name)}",
            f"{variable.dtype.name}{list(variable.shape)}{_use(variable)}",
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
                # All others are read from the optimizer's attributes, which a commit leaves alone.
                stored=name == "learning_rate" and isinstance(value, float),
            )
            for name, value in sorted(component.get_config().items())
            if name != "name"
        ]
    return entries


def _use(variable: Any) -> str:
    return ", trained" if variable.trainable else ""
