"""The bytes that stand for one element of a data set, the same for equal elements on every host.

Arrays of every framework with the same dtype, shape and bits count as equal; so do lists and tuples.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.digest import Digest
from hvdrecover.errors import ConfigError

_LISTED = 8  # items of a sequence that an outline describes one by one
_INTEGERS = {1: "byte", 2: "short", 4: "int", 8: "long"}  # by their bytes: the method of a torch tensor
_NO_ARRAY = (TypeError, ValueError, NotImplementedError, RuntimeError)  # what arrays that can't be had raise


def element_digest(element: Any, name: str) -> str:
    """The digest of an element.

    Args:
        element: arrays, tensors, images, numbers, texts and None; nested in mappings, sequences, dataclasses.
        name: what to call it in an error.

    Raises:
        ConfigError: something else is in it.
    """
    digest = Digest()
    for piece in _pieces(element, name):
        digest.update(piece)
    return digest.hex()[:16]


def _pieces(value: Any, name: str) -> Iterator[Any]:
    if is_array(value) or hasattr(value, "__array_interface__"):
        yield from _array_pieces(value, name)
    elif value is None or isinstance(value, bool | int | float | complex):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, str):
        yield from _counted("str", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, os.PathLike):
        yield from _counted("str", os.fsencode(value))
    elif isinstance(value, bytes | bytearray):
        yield from _counted("bytes", bytes(value))
    elif isinstance(value, Mapping):
        yield f"dict {len(value)};".encode()
        for key in sorted(value, key=repr):
            yield from _counted("key", repr(key).encode("utf-8", "surrogatepass"))
            yield from _pieces(value[key], f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        yield f"list {len(value)};".encode()
        for number, item in enumerate(value):
            yield from _pieces(item, f"{name}[{number}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        yield from _pieces(fields, name)
    else:
        raise ConfigError(
            "data",
            f"{name} is a {type(value).__name__}, which has no bytes to compare; have the data set give "
            "arrays, numbers and texts, or pass the files that it reads",
        )


def _counted(kind: str, data: bytes) -> Iterator[bytes]:
    yield f"{kind} {len(data)};".encode()
    yield data


def _array_pieces(value: Any, name: str) -> Iterator[Any]:
    array = to_numpy(value, name)
    if array.dtype.hasobject:  # texts, as TensorFlow gives them
        yield from _pieces(array.tolist(), name)
        return
    yield f"array {outline(value if is_array(value) else array)};".encode()
    yield from array_bytes(array)


def array_bytes(array: npt.NDArray[Any]) -> Iterator[Any]:
    """The bytes of an array in C order, little-endian, without what pads the fields of a structured dtype.

    Only what is not in this order in memory is copied.
    """
    if array.dtype.names is not None:
        for field in array.dtype.names:
            yield from array_bytes(array[field])
        return
    little = array.dtype.newbyteorder("<")
    ordered = np.ascontiguousarray(array if little == array.dtype else array.astype(little))
    if ordered.nbytes:
        yield ordered.reshape(-1).view(np.uint8)


def is_array(value: Any) -> bool:
    """Return whether a value is an array or a tensor of some framework, or a number of numpy's."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "__array__")) and not isinstance(
        value, type
    )


def to_numpy(value: Any, name: str) -> npt.NDArray[Any]:
    """An array or tensor as a numpy array, by its bits where numpy lacks the dtype; in place where possible.

    Raises:
        ConfigError: it can't be read: it is sparse, ragged or symbolic.
    """
    refuse_sparse(value, name)
    try:
        if hasattr(value, "detach"):
            return _of_torch(value)
        return np.asarray(value)
    except _NO_ARRAY as error:
        raise ConfigError("data", f"{name} can't be read as an array: {error}") from error


def refuse_sparse(value: Any, name: str) -> None:
    """Raise a `ConfigError` for a sparse tensor of torch, which can't even be sliced."""
    layout = str(getattr(value, "layout", "torch.strided"))
    if layout != "torch.strided":
        problem = f"{name} can't be read as an array: it is a tensor of layout {layout}; pass its parts"
        raise ConfigError("data", problem)


def _of_torch(tensor: Any) -> npt.NDArray[Any]:
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:
        if tensor.element_size() not in _INTEGERS:
            raise
        # bfloat16 and the like. No torch is imported here to name integers by, but a tensor can make them.
        integer = getattr(tensor.new_empty(0), _INTEGERS[tensor.element_size()])().dtype
        return np.asarray(tensor.view(integer).numpy())


def dtype_name(dtype: Any) -> str:
    """A dtype's name, the same in all frameworks."""
    if getattr(dtype, "names", None):
        return str(dtype.newbyteorder("<").descr)
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def outline(value: Any) -> str:
    """Dtypes and shapes of an element, or of what specifies one, as text."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{dtype_name(value.dtype)}{_shape(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {outline(value[key])}" for key in sorted(value, key=repr)) + "}"
    if isinstance(value, list | tuple):
        if len(value) > _LISTED:
            return f"a sequence of {len(value)}"
        return "(" + ", ".join(outline(item) for item in value) + ")"
    return type(value).__name__


def _shape(shape: Any) -> str:
    try:
        return str([None if size is None else int(size) for size in shape])
    except _NO_ARRAY:
        return "[?]"  # TensorFlow's shape of unknown rank
