"""The arguments of Horovod's functions, for ours in their place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import tensorflow as tf

from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.variables import Variable

Layers: TypeAlias = keras.layers.Layer | Sequence[keras.layers.Layer] | None

Result = TypeVar("Result")


def taking_what(horovods: Callable[..., Any], function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function that takes what one of Horovod's takes, at the same places, with the same defaults.

    Horovod has several functions of the same meaning with their arguments in another order.

    Args:
        horovods: Horovod's.
        function: does the work; takes all of that by name.
    """
    signature = inspect.signature(horovods)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Result:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return function(**given.arguments)

    wrapper.__name__ = wrapper.__qualname__ = horovods.__name__
    wrapper.__signature__ = signature
    taking: Callable[..., Result] = wrapper
    return taking


def weights_of(local_layers: Layers) -> list[Variable]:
    """Return what layers train.

    Raises:
        ConfigError: not a layer.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ConfigError("local_layers", f"a {type(layer).__name__} is not a Keras layer")
    return [variable for layer in layers for variable in layer.trainable_weights]
