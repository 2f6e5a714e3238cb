"""Horovod's collectives for TensorFlow 2 and Keras 3, and how to tell that ranks were lost."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvdrecover import config
from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.errors import ConfigError, HvdrecoverError
from hvdrecover.guard.numbers import RolledBack
from hvdrecover.state.horovod import HorovodWorld
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
    # TensorFlow computes operations of constants once, while it makes a graph. A process that makes its
    # graphs again after a recovery would then wait for ranks that have theirs. Horovod's other collectives
    # are declared stateful, which forbids that. Allreduces are not: Horovod's tape puts each into a condition
    # of its own, and TensorFlow would run stateful conditions one after the other.
    given = tf.convert_to_tensor(raw(tensor))
    # The choice depends on a variable. TensorFlow would still compute a reshape by a variable, or a
    # placeholder with a default, in advance; and to add a zero would turn -0.0 into 0.0.
    return tf.where(_zero() < 1, given, tf.zeros_like(given))


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
    """Return a function that takes Horovod's arguments in Horovod's order, and hands them on by name."""
    signature = inspect.signature(horovods)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    @functools.wraps(function, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Made:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return function(**given.arguments)

    wrapper.__name__ = wrapper.__qualname__ = horovods.__name__
    wrapper.__signature__ = signature
    unconverted: Callable[..., Made] = wrapper
    return unconverted


def outside_of_traces(make: Callable[[], Made]) -> Made:
    """Make variables from within any trace."""
    # When TensorFlow traces a function a second time, it refuses new variables, even in `tf.init_scope`.
    # Made at import, they would fix TensorFlow's devices before the script chooses them.
    # A trace belongs to its thread, so another thread makes the variables.
    with ThreadPoolExecutor(1, "hvdrecover-variables") as thread:
        return thread.submit(make).result()


def counter(dtype: tf.DType = tf.int64) -> tf.Variable:
    def make() -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(0, dtype=dtype, trainable=False)

    return outside_of_traces(make)


_zero = functools.cache(counter)


def xla_compiles() -> bool:
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def refuse_xla() -> None:
    if xla_compiles():
        raise ConfigError(
            "jit_compile",
            "XLA can't compile Horovod's collectives, nor what a guard does about gradients that are not "
            "finite; pass jit_compile=False to tf.function or to model.compile, or hvdrecover's callbacks to "
            "model.fit",
        )


# -- the ranks, and how to tell that some were lost
# TensorFlow hands a failed collective on as some error, whose text may name the node. It does the same with
# errors of user code in a graph, so neither kind nor text can be relied on. But once a rank is lost, every
# collective fails. While all are there, a collective that the others do not join waits. So an error that may
# come of a lost rank is followed by our own collective, the probe: if that fails, ranks were lost.

# The errors of a failed collective, and of operations that TensorFlow cancels for that reason.
_POSSIBLE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
    tf.errors.UnknownError,
)
_MARGIN = 5.0  # seconds beyond the time after which Horovod gives up a rank that says nothing


class TensorFlowWorld(HorovodWorld):
    def __init__(self) -> None:
        super().__init__(hvd)

    def lost(self, error: BaseException) -> bool:
        """Return whether an error came of lost ranks; this may wait for as long as Horovod waits for one."""
        global _probe
        if not isinstance(error, _POSSIBLE):
            return False
        if not hvd.is_initialized():
            return True
        if _probe is None or not _probe.is_alive():  # a second one of the same name would fail for that
            _probe = _Probe()
            _probe.start()
        _probe.join(config.read().collective_seconds + _MARGIN)  # no wait if all ranks ask at once
        return _probe.has_failed

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        if self.size() == 1:
            return mine
        with tf.device("CPU:0"):
            joined: npt.NDArray[np.int64] = hvd.allgather(tf.constant(mine), name=name).numpy()
        return joined

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        if self.size() > 1 and len(buffer):
            with tf.device("CPU:0"):
                sent = hvd.broadcast(tf.constant(buffer), root, name=name)
            if self.rank() != root:
                buffer[:] = sent.numpy()


class _Probe(threading.Thread):
    has_failed = False

    def __init__(self) -> None:
        super().__init__(name="hvdrecover-probe", daemon=True)  # it may wait for as long as the job lasts

    def run(self) -> None:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def probe() -> tf.Tensor:
            return hvd.allreduce(tf.zeros(()), op=hvd.Sum, name="hvdrecover_probe", ignore_name_scope=True)

        try:
            with tf.device("CPU:0"):
                probe()
        except tf.errors.OpError:
            self.has_failed = True


_probe: _Probe | None = None
_raised: Exception | None = None


def in_python(function: Callable[..., Any], inputs: Sequence[tf.Tensor], result: Any) -> Any:
    """Call a function of ours whenever the present graph runs; `original` finds an error that it raises."""

    def call(*arguments: tf.Tensor) -> Any:
        global _raised
        try:
            return function(*arguments)
        except (HvdrecoverError, RolledBack) as error:
            _raised = error
            raise

    with tf.device("CPU:0"):
        return tf.py_function(call, inputs, result)


def original(error: BaseException) -> Exception | None:
    """Return the error of ours that TensorFlow has made another one of; None if it has not."""
    passed = isinstance(error, tf.errors.OpError) and _raised is not None and str(_raised) in str(error)
    return _raised if passed else None
