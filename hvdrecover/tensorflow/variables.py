"""The variables of models, optimizers and other components: whether they exist, and their names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf
from keras.src.layers.merging.base_merge import Merge
from keras.src.utils.python_utils import is_default

from hvdrecover.errors import ConfigError

Variable = Any
"""A ``tf.Variable`` or a ``keras.Variable``."""
Gradient = Any
"""A ``tf.Tensor``, ``tf.IndexedSlices`` or None."""
Layers: TypeAlias = keras.layers.Layer | Sequence[keras.layers.Layer] | None

# Keras numbers layers without a name by how many of their kind the process has made: dense, dense_1, ….
# So the numbers of a new process differ.
_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def is_variable(value: Any) -> bool:
    return isinstance(value, tf.Variable | keras.Variable)


def raw(variable: Variable) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def variables_of(component: Any) -> list[Variable] | None:
    """Return all variables of a component in a fixed order; None if the value is not a component."""
    if is_variable(component):
        return [component]
    if isinstance(component, type):
        return None
    if isinstance(component, list | tuple | dict):
        first = next(iter(component.values() if isinstance(component, dict) else component), None)
        if not is_variable(first) and not isinstance(first, list | tuple | dict):
            return None  # quickly: each commit asks for each attribute
        if not all(is_variable(leaf) for _, leaf in _leaves(component)):
            return None
        return [leaf for _, leaf in _leaves(component)]
    found = getattr(component, "variables", None)
    if isinstance(found, Sequence) and not isinstance(found, str) and all(map(is_variable, found)):
        return list(found)
    return None


def _leaves(value: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the leaves of nested lists, tuples and dicts, with paths; of dicts in the order of their keys."""
    if not isinstance(value, list | tuple | dict) or not value or len(path) > 8:  # a list may contain itself
        yield path, value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _leaves(value[key], *path, str(key))
    else:
        for number, each in enumerate(value):
            yield from _leaves(each, *path, str(number))


def is_seed(variable: Variable) -> bool:
    return isinstance(variable, keras.Variable) and variable.name == "seed_generator_state"


def named(component: Any) -> dict[str, tf.Variable]:
    """Return the variables that are training state, by Keras path, name or key, each name once."""
    found: dict[str, tf.Variable] = {}
    variables = variables_of(component) or []
    paths = [path for path, _ in _leaves(component)] if isinstance(component, list | tuple | dict) else []
    has_keys = isinstance(component, dict) or any(len(path) > 1 for path in paths)
    names = list(map(".".join, paths)) if has_keys else list(map(name_of, variables))
    for name, variable in zip(names, variables, strict=True):
        if not is_seed(variable):
            unused = name
            numbers = itertools.count(1)
            while unused in found:
                unused = f"{name}_{next(numbers)}"
            found[unused] = raw(variable)
    return found


def weights_of(local_layers: Layers) -> list[Variable]:
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ConfigError("local_layers", f"a {type(layer).__name__} is not a Keras layer")
    return [variable for layer in layers for variable in layer.trainable_weights]


def name_of(variable: Variable) -> str:
    name = variable.path if isinstance(variable, keras.Variable) else variable.name
    return str(name).removesuffix(":0")


def without_numbers(name: str) -> str:
    """Return a name without Keras's numbers: the same in a process that has made more layers before."""
    return _NUMBER.sub("", name)


def mean_the_same(stored: Sequence[str], mine: Sequence[str]) -> bool:
    """Return whether names are of the same variables in another process, or a model made in another way."""
    # Keras may number layers differently. A model's own name stands before its variables' or not, by when the
    # model was built: `net/dense/kernel` and `adam/net_dense_kernel_momentum`, or `dense/kernel`.
    pair = [list(map(without_numbers, names)) for names in (stored, mine)]
    longer, shorter = sorted(pair, key=lambda names: sum(map(len, names)), reverse=True)
    if len(longer) != len(shorter):
        return False
    added = {_added(*names) for names in zip(longer, shorter, strict=True) if names[0] != names[1]}
    return len(added) <= 1 and None not in added


def _added(longer: str, shorter: str) -> str | None:
    """Return the part, such as ``net``, that ``longer`` has in addition, or None."""
    for place in (0, shorter.find("/") + 1):  # at the beginning, or after the first slash
        rest = shorter[place:]
        part = longer[place : len(longer) - len(rest)]
        if part.endswith(("/", "_")) and longer == shorter[:place] + part + rest:
            return part.rstrip("/_")
    return None


# -- models and optimizers whose variables do not exist yet --------------------------------------------------


def build_optimizer(optimizer: Any, model: Any) -> None:
    trainable = getattr(model, "trainable_variables", None)
    if isinstance(optimizer, keras.optimizers.Optimizer) and not optimizer.built and trainable is not None:
        optimizer.build(trainable)


def refuse_unbuilt(name: str, value: Any) -> None:
    if isinstance(value, keras.layers.Layer):
        inside = value._flatten_layers(include_self=False)
        unbuilt = [each for each in inside if not each.built and not is_default(each.build)]
        names = list(dict.fromkeys(f"'{each.name}'" for each in unbuilt if not isinstance(each, Merge)))
        # Keras cannot build a model without `call`, such as a GAN, but all its layers may be built.
        if names or not (value.built or value.weights):
            inside_of = f" in layers {', '.join(names[:5])}" if names else ""
            raise ConfigError(
                name,
                f"the model has no variables yet{inside_of}, so there is nothing to be kept or loaded into; "
                "call model.build(input_shape), or the model on one batch, such as model(batch), first, and "
                "leave out layers that it does not use",
            )
    if isinstance(value, keras.optimizers.Optimizer) and not value.built:
        raise ConfigError(
            name,
            "the optimizer has no slots yet, so there is nothing to be kept or loaded into; call "
            "optimizer.build(model.trainable_variables) first",
        )
