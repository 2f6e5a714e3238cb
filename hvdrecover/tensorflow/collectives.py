"""Horovod's functions for TensorFlow 2 and Keras 3: reductions, broadcasts, and their needs in graphs.

TensorFlow computes operations of constants once, while it makes a graph. A process that makes its graphs
again after a recovery would then wait for ranks that have theirs. Horovod's other collectives are declared
stateful, which forbids that. Allreduces are not, as Horovod's tape puts each into a condition of its own, and
TensorFlow would run stateful conditions one after the other. So ours make their input depend on a variable.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdrecover.errors import ConfigError
from hvdrecover.tensorflow.variables import Variable, raw

Made = TypeVar("Made")


@functools.wraps(hvd.allreduce, assigned=())
def allreduce(tensor: Any, *args: Any, **options: Any) -> Any:
    """Reduce a tensor over all ranks, as ``horovod.tensorflow.allreduce``; in each call, also of constants.

    Args:
        tensor: a tensor, a variable or ``tf.IndexedSlices``; of the same shape on all ranks.
        args: Horovod's, as ``options``.

    Examples:
        >>> mean = recover.allreduce(tf.constant([1.0, 2.0]), name="mean")
    """
    return hvd.allreduce(_not_constant(tensor), *args, **options)


@functools.wraps(hvd.grouped_allreduce, assigned=())
def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> Any:
    """Reduce tensors over all ranks as one group, as ``horovod.tensorflow.grouped_allreduce``.

    Examples:
        >>> mean, total = recover.grouped_allreduce([tf.constant(1.0), tf.constant(2.0)], name="both")
    """
    return hvd.grouped_allreduce([_not_constant(each) for each in tensors], *args, **options)


def _not_constant(tensor: Any) -> Any:
    """Return a tensor of the same values and shape that TensorFlow does not take for a constant."""
    if not tf.inside_function() or isinstance(tensor, tf.IndexedSlices):  # slices are gathered
        return tensor
    given = tf.convert_to_tensor(raw(tensor))
    # The choice depends on a variable. TensorFlow would still compute a reshape by a variable, or a
    # placeholder with a default, in advance; and to add a zero would turn -0.0 into 0.0.
    return tf.where(_zero() < 1, given, tf.zeros_like(given))


@functools.cache
def _zero() -> tf.Variable:
    return counter(tf.int32)


@functools.wraps(hvd.broadcast_variables, assigned=())
def broadcast_variables(variables: Iterable[Variable], *args: Any, **options: Any) -> Any:
    """Give variables the values that they have on one rank, as ``horovod.tensorflow.broadcast_variables``.

    Args:
        variables: TensorFlow's or Keras's; the same on all ranks.
        args: Horovod's, as ``options``.

    Examples:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> done = recover.broadcast_variables([weights], root_rank=0)
    """
    return hvd.broadcast_variables([raw(each) for each in variables], *args, **options)


@functools.wraps(hvd.broadcast_, assigned=())
def broadcast_(variables: Iterable[Variable], *args: Any, **options: Any) -> Any:
    """Give variables the values that they have on one rank, as `broadcast_variables` does, without a copy.

    Examples:
        >>> weights = tf.Variable([1.0, 2.0])
        >>> done = recover.broadcast_([weights], root_rank=0)
    """
    return hvd.broadcast_([raw(each) for each in variables], *args, **options)


class BroadcastGlobalVariablesHook:
    """A hook of TensorFlow 1's sessions, which TensorFlow 2 lacks: it always raises a `ConfigError`."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        remedy = "TensorFlow 2 has no session hooks; call hvd.broadcast_variables(model.variables, root_rank)"
        raise ConfigError("BroadcastGlobalVariablesHook", remedy)


def taking_what(horovods: Callable[..., Any], function: Callable[..., Made]) -> Callable[..., Made]:
    """Return a function that takes the arguments of one of Horovod's, and hands them on by name.

    Horovod has several functions of the same meaning with their arguments in another order.
    """
    signature = inspect.signature(horovods)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Made:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return function(**given.arguments)

    wrapper.__name__ = wrapper.__qualname__ = horovods.__name__
    wrapper.__signature__ = signature
    taking: Callable[..., Made] = wrapper
    return taking


def outside_of_traces(make: Callable[[], Made]) -> Made:
    """Make variables from within any trace.

    When TensorFlow traces a function a second time, it refuses new variables, even in ``tf.init_scope``. At
    import, they would fix TensorFlow's devices before the user's script has chosen them. But a trace belongs
    to its thread, so another thread makes the variables.
    """
    with ThreadPoolExecutor(1, "hvdrecover-variables") as thread:
        return thread.submit(make).result()


def counter(dtype: tf.DType = tf.int64) -> tf.Variable:
    """Return a new variable on the host that graphs can change; it is 0 at first."""

    def make() -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(0, dtype=dtype, trainable=False)

    return outside_of_traces(make)


def xla_compiles() -> bool:
    """Return whether the graph that is being made, or one around it, is for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse_xla() -> None:
    """Raise an error if XLA is about to compile the present graph."""
    if xla_compiles():
        raise ConfigError(
            "jit_compile",
            "XLA can't compile Horovod's collectives, nor what a guard does about gradients that are not "
            "finite; pass jit_compile=False to tf.function or to model.compile, or hvdrecover's callbacks to "
            "model.fit",
        )
