"""Seeing to it that models and optimizers have their variables, so that there is something to load into."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.layers.merging.base_merge import Merge
from keras.src.utils.python_utils import is_default

from hvdrecover.errors import ConfigError


def refuse_unbuilt(name: str, value: Any) -> None:
    """Refuse a Keras model, layer or optimizer that has not made its variables yet.

    Args:
        name: what to call it in the error.
        value: anything; what Keras does not build is let pass.

    Raises:
        ConfigError: it has not been built.
    """
    if isinstance(value, keras.layers.Layer) and not value.built and not _is_made_of_built_layers(value):
        raise ConfigError(
            name,
            "the model has no variables yet, so there is nothing to be kept or loaded into; call "
            "model.build(input_shape), or the model on one batch, first",
        )
    if isinstance(value, keras.layers.Layer) and (unbuilt := _unbuilt_inside(value)):
        raise ConfigError(
            name,
            f"layers inside lack variables, {', '.join(unbuilt[:5])}, so there is nothing to be kept "
            "or loaded into: build() of a subclass that defines none does not reach them; call the model on "
            "one batch first, such as model(batch), and leave out layers that it does not use",
        )
    if isinstance(value, keras.optimizers.Optimizer) and not value.built:
        raise ConfigError(
            name,
            "the optimizer has no slots yet, so there is nothing to be kept or loaded into; call "
            "optimizer.build(model.trainable_variables) first",
        )


def _is_made_of_built_layers(layer: keras.layers.Layer) -> bool:
    """Return whether all variables of a model exist, though Keras can't build it: it has no ``call``."""
    made_by_keras = type(layer).build is keras.Model.build
    return made_by_keras and bool(layer.weights) and not _unbuilt_inside(layer)


def _unbuilt_inside(layer: keras.layers.Layer) -> list[str]:
    """The names of the layers inside a layer that have yet to make variables."""
    inside = layer._flatten_layers(include_self=False)
    unbuilt = [each for each in inside if not each.built and not is_default(each.build)]
    return list(dict.fromkeys(f"'{each.name}'" for each in unbuilt if not isinstance(each, Merge)))


def build_optimizer(optimizer: Any, model: Any) -> None:
    """Make the slots of a Keras optimizer that has none yet, for what a model trains; None is let pass."""
    trainable = getattr(model, "trainable_variables", None)
    if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built and trainable is not None:
        optimizer.build(trainable)
