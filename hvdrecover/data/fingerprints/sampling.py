"""The choice of parts to look at in large data, and short digests of them.

Everything here is a function of its arguments alone, the same on every host and for ever: stored fingerprints
are compared with what later versions choose.
"""

from __future__ import annotations

import xxhash

SHORT_BITS = 64


def short(data: bytes) -> int:
    """A digest of 64 bits (xxh3-64): plenty to see a change in a name, and there may be millions of them."""
    return xxhash.xxh3_64_intdigest(data)


def hexadecimal(number: int, bits: int = SHORT_BITS) -> str:
    """A digest as a string of fixed length."""
    return f"{number:0{bits // 4}x}"


def spread(length: int, count: int) -> list[int]:
    """``count`` of the numbers below ``length``, in order: the first, the last, one of each equal stretch.

    One of each stretch at random, rather than its first: data often have a period, and a step of fixed width
    could miss what comes in between each time.

    Args:
        length: how many there are to choose from.
        count: how many to choose, at least 2; all, if there are no more.
    """
    if length <= count:
        return list(range(length))
    chosen = [0]
    for stretch in range(1, count - 1):
        start, end = stretch * length // count, (stretch + 1) * length // count
        chosen.append(start + short(f"{length}:{stretch}".encode()) % (end - start))
    return [*chosen, length - 1]
