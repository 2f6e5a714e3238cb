"""The numbers in a tensor's bytes, by numpy alone, also in dtypes that numpy lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import Bytes

Numbers = npt.NDArray[Any]

_NUMPY = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "C64": "<c8",
}


def _e4m3() -> npt.NDArray[np.float32]:
    """The value of each byte: 1 sign bit, 4 bits of exponent (bias 7), 3 of fraction; no infinities.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433.
    """
    code = np.arange(256)
    exponent, fraction = (code >> 3) & 0xF, code & 0x7
    normal = np.ldexp(1 + fraction / 8, exponent - 7)
    magnitude = np.where(exponent == 0, np.ldexp(fraction / 8, -6), normal)
    magnitude[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -magnitude, magnitude).astype(np.float32)


_E4M3 = _e4m3()


def decode(data: Bytes, dtype: str) -> Numbers:
    """The numbers that bytes stand for.

    Args:
        data: a uint8 array; whole numbers of the dtype.
        dtype: a key of `hvdrecover.checkpoint.layout.ITEM_BYTES`.

    Returns:
        A flat array: of the dtype itself, where numpy has it, and a view of ``data``; of uint8 for booleans;
        of float32 for bfloat16 and float8, whose values it holds exactly.
    """
    if dtype == "BF16":  # the upper half of a float32
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of a float16
        return (data.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if dtype == "F8_E4M3":
        return _E4M3[data]
    return data.view(_NUMPY[dtype])
