"""The distance between the numbers in the bytes of two tensors."""

from __future__ import annotations

import numpy as np

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.inspection.decoding import decode
from hvdrecover.checkpoint.layout import ITEM_BYTES


def apart(mine: Bytes, others: Bytes, dtype: str) -> tuple[int, float]:
    """Return how many numbers differ in their bits, and by how much at most.

    Args:
        mine: uint8 of shape ``[n]``, a multiple of the dtype's size.
        others: of the same shape.
        dtype: a key of `hvdrecover.checkpoint.layout.ITEM_BYTES`.

    Returns:
        The count, and the largest absolute difference: infinite or NaN where a number is.
    """
    rows = [each.reshape(-1, ITEM_BYTES[dtype]) for each in (mine, others)]
    places = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    if not len(places):
        return 0, 0.0
    wide = np.complex128 if dtype == "C64" else np.float64
    pair = [decode(each[places].reshape(-1), dtype).astype(wide) for each in rows]
    with np.errstate(all="ignore"):
        return len(places), float(np.abs(pair[0] - pair[1]).max())
