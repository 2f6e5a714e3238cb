"""The variables of models, optimizers and whatever else holds some, and what they are called."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import keras
import tensorflow as tf

Variable = Any
"""A ``tf.Variable`` or a ``keras.Variable``."""

Made = TypeVar("Made")

# Keras numbers what has no name of its own by how many of its kind the process has made: dense, dense_1, ….
_NUMBER = re.compile(r"_\d+(?=[/_]|$)")


def outside_of_traces(make: Callable[[], Made]) -> Made:
    """Make variables of our own, wherever this is called from.

    When TensorFlow traces a function a second time, it refuses variables that are made meanwhile, even in
    ``tf.init_scope``. To make them at import would settle TensorFlow's devices before the user's script has.
    But a trace belongs to its thread; so this is done on another one.

    Args:
        make: makes the variables, eagerly.
    """
    with ThreadPoolExecutor(1, "hvdrecover-variables") as thread:
        return thread.submit(make).result()


def counter(dtype: tf.DType = tf.int64) -> tf.Variable:
    """A new number that graphs can change, 0 at first, on the host; see `outside_of_traces`."""

    def make() -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(0, dtype=dtype, trainable=False)

    return outside_of_traces(make)


def is_variable(value: Any) -> bool:
    """Return whether a value is a variable, of TensorFlow or of Keras."""
    return isinstance(value, tf.Variable | keras.Variable)


def variables_of(component: Any) -> list[Variable] | None:
    """All variables of a component in a fixed order, or None if the value is not a component.

    A component is a variable, a list or tuple of variables, or an object with ``variables``: a Keras model,
    layer, optimizer or metric, or a ``tf.Module``.
    """
    if is_variable(component):
        return [component]
    if isinstance(component, type):
        return None
    found = component if type(component) in (list, tuple) and component else _variables_inside(component)
    if isinstance(found, Sequence) and not isinstance(found, str) and all(map(is_variable, found)):
        return list(found)
    return None


def _variables_inside(value: Any) -> Any:
    return getattr(value, "variables", None) if not isinstance(value, dict | list | tuple) else None


def is_seed(variable: Variable) -> bool:
    """Return whether a variable is the state of a ``keras.random.SeedGenerator``, as a dropout layer has."""
    return isinstance(variable, keras.Variable) and variable.name == "seed_generator_state"


def named(component: Any) -> dict[str, tf.Variable]:
    """The variables that are training state, by Keras path or by name, each name once."""
    found: dict[str, tf.Variable] = {}
    for variable in variables_of(component) or []:
        if not is_seed(variable):
            found[_unused(name_of(variable), found)] = raw(variable)
    return found


def seeds(component: Any) -> list[tf.Variable]:
    """The states of the component's seed generators; uint32 of shape ``[2]``."""
    return [raw(variable) for variable in variables_of(component) or [] if is_seed(variable)]


def raw(variable: Variable) -> tf.Variable:
    """The ``tf.Variable`` of a variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def name_of(variable: Variable) -> str:
    """A variable's Keras path or name."""
    name = variable.path if isinstance(variable, keras.Variable) else variable.name
    return str(name).removesuffix(":0")


def without_numbers(name: str) -> str:
    """A name without the numbers that Keras gave: the same in a process that has made more layers before."""
    return _NUMBER.sub("", name)


def mean_the_same(stored: Sequence[str], mine: Sequence[str]) -> bool:
    """Return whether names are of the same variables in another process, or a model made in another way.

    Keras may have numbered layers differently. And it puts a model's own name before its variables' or not,
    depending on when the model was built: ``net/dense/kernel``, and ``adam/net_dense_kernel_momentum``, or
    ``dense/kernel`` for the same model made of its config.
    """
    pair = [list(map(without_numbers, names)) for names in (stored, mine)]
    longer, shorter = sorted(pair, key=lambda names: sum(map(len, names)), reverse=True)
    if len(longer) != len(shorter):
        return False
    added = {_added(*names) for names in zip(longer, shorter, strict=True) if names[0] != names[1]}
    return len(added) <= 1 and None not in added


def _added(longer: str, shorter: str) -> str | None:
    """Return what a name lacks at its beginning or after its first slash, such as ``net``; None for more."""
    for place in (0, shorter.find("/") + 1):
        rest = shorter[place:]
        part = longer[place : len(longer) - len(rest)]
        if part.endswith(("/", "_")) and longer == shorter[:place] + part + rest:
            return part.rstrip("/_")
    return None


def _unused(name: str, used: dict[str, tf.Variable]) -> str:
    number, found = 1, name
    while found in used:
        found, number = f"{name}_{number}", number + 1
    return found
