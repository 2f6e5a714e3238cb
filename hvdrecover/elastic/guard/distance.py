"""Bytes of tensors as numbers, and how far two of them are apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.layout import ITEM_BYTES

_NUMPY = {
    "BOOL": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "F64": np.float64,
    "C64": np.complex64,
}


def apart(mine: Bytes, others: Bytes, dtype: str) -> tuple[int, float]:
    """Return how many numbers differ in their bits, and by how much at most.

    Args:
        mine: uint8 of shape ``[n]``, a multiple of the dtype's size.
        others: of the same shape.
        dtype: a key of `hvdrecover.checkpoint.layout.ITEM_BYTES`.

    Returns:
        The count, and the largest absolute difference: infinite or NaN where a number is, and NaN for dtypes
        of 8 bits with an exponent, which numpy lacks.
    """
    width = ITEM_BYTES[dtype]
    places = np.flatnonzero((mine.reshape(-1, width) != others.reshape(-1, width)).any(axis=1))
    if not len(places):
        return 0, 0.0
    pair = [_decoded(each.reshape(-1, width)[places], dtype) for each in (mine, others)]
    if pair[0] is None or pair[1] is None:
        return len(places), float("nan")
    with np.errstate(all="ignore"):
        return len(places), float(np.abs(pair[0] - pair[1]).max())


def _decoded(data: Bytes, dtype: str) -> npt.NDArray[Any] | None:
    """float64 or complex128 of shape ``[n]``, of uint8 ``[n, width]``."""
    flat = np.ascontiguousarray(data).reshape(-1)
    if dtype == "BF16":
        # The upper half of a float32: https://en.wikipedia.org/wiki/Bfloat16_floating-point_format
        return (flat.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype not in _NUMPY:
        return None
    return flat.view(_NUMPY[dtype]).astype(np.complex128 if dtype == "C64" else np.float64)
