"""A look at whether tensors are finite, and a gate that asks Python if they are not.

Both are compiled operations where there was a C compiler. Otherwise, with a GPU, and for XLA, they are
made of TensorFlow's own, which cost a small model some percent of its steps.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdrecover.tensorflow import xla

_LARGE = 1 << 16  # numbers; looking at so many is worth an operation, which others can run beside


def each_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return which tensors are finite in all of their numbers.

    Args:
        tensors: one or more, of real or complex floats.

    Returns:
        Bool of shape ``[len(tensors)]``.
    """
    real = [tf.bitcast(each, each.dtype.real_dtype) if each.dtype.is_complex else each for each in tensors]
    if _operations is None or xla.compiles() or tf.config.list_logical_devices("GPU"):
        return tf.stack([tf.reduce_all(tf.math.is_finite(each)) for each in real])
    groups = _groups([each.shape.num_elements() for each in real])
    flags = [_operations.hvdrecover_are_finite(tensors=[real[place] for place in group]) for group in groups]
    if len(flags) == 1:
        return flags[0]
    return tf.gather(tf.concat(flags, 0), np.argsort([place for group in groups for place in group]))


def _groups(sizes: Sequence[int | None]) -> list[list[int]]:
    """The places of tensors that are looked at by one operation; a size is None if it is not known yet."""
    small = [place for place, size in enumerate(sizes) if size is not None and size < _LARGE]
    large = [[place] for place, size in enumerate(sizes) if size is None or size >= _LARGE]
    return [small, *large] if small else large


class Gate:
    """Asks Python about tensors of which not all are finite, in a graph or not.

    Args:
        ask: told of each tensor whether it is finite, and whether it was on this rank. When it returns, the
            tensors are to be left out; when it raises an error, the graph fails with that error's text.
    """

    def __init__(self, ask: Callable[[list[bool], list[bool]], None]) -> None:
        self._ask = ask
        self._failure: Any = None  # its text, which is kept until it was read
        self._number = next(_numbers)
        _gates[self._number] = self

    def __call__(self, finite: tf.Tensor, mine: tf.Tensor) -> tf.Tensor:
        """Go through the gate.

        Args:
            finite: of each tensor, whether it is finite; bool of shape ``[n]``.
            mine: whether it was on this rank; of the same shape.

        Returns:
            A bool, whether all are finite.

        Raises:
            ConfigError: XLA is to compile it.
        """
        xla.refuse("what a guard does about gradients that are not finite")
        if _operations is not None:
            return _operations.hvdrecover_gate(finite=finite, mine=mine, number=self._number)
        return tf.cond(tf.reduce_all(finite), lambda: tf.constant(True), lambda: self._shut(finite, mine))

    def _shut(self, finite: tf.Tensor, mine: tf.Tensor) -> tf.Tensor:
        def ask(finite: tf.Tensor, mine: tf.Tensor) -> None:
            self._ask(finite.numpy().tolist(), mine.numpy().tolist())

        with tf.device("CPU:0"):
            tf.py_function(ask, [finite, mine], [])
        return tf.constant(False)

    def answer(self, finite: list[bool], mine: list[bool]) -> int | None:
        """Ask for the compiled operation: None, or the address of a text that says why to fail."""
        try:
            self._ask(finite, mine)
        except BaseException as error:
            self._failure = ctypes.create_string_buffer(f"{type(error).__name__}: {error}".encode())
            return ctypes.addressof(self._failure)
        return None


_numbers = itertools.count()
_gates: weakref.WeakValueDictionary[int, Gate] = weakref.WeakValueDictionary()

_FLAGS = ctypes.POINTER(ctypes.c_bool)
_GONE = ctypes.create_string_buffer(
    b"a gradient is not finite, and the optimizer that would say which is gone"
)


def _ask(gate: int, finite: Any, mine: Any, count: int) -> int | None:
    if gate not in _gates:
        return ctypes.addressof(_GONE)
    return _gates[gate].answer(finite[:count], mine[:count])


_asked = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int64, _FLAGS, _FLAGS, ctypes.c_int64)(_ask)


def _load() -> Any:
    """The compiled operations; None if there are none, or none that this TensorFlow has taken."""
    found = importlib.util.find_spec("hvdrecover.tensorflow._finite")
    if found is None or found.origin is None:
        return None
    operations = tf.load_op_library(found.origin)
    if not hasattr(operations, "hvdrecover_gate"):
        return None
    ctypes.CDLL(found.origin).hvdrecover_ask_by(_asked)
    return operations


_operations = _load()
