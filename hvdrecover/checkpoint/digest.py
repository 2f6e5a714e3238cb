"""The digest that vouches for a file: xxh3-128, in hexadecimal.

It finds damage; it is not a defence against somebody who can write to the root.
Source: https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

from typing import Any

import xxhash


class Digest:
    """A digest of bytes that come piece by piece; other threads run while a large piece is taken in."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, piece: Any) -> None:
        self._state.update(piece)

    def hex(self) -> str:
        return self._state.hexdigest()

    def numbers(self) -> tuple[int, int]:
        return _halves(self._state.intdigest())


def digest(data: Any) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def digest_numbers(data: Any) -> tuple[int, int]:
    """The digest of bytes or of a buffer as two signed numbers of 64 bits, as collectives carry them."""
    return _halves(xxhash.xxh3_128_intdigest(data))


def _halves(number: int) -> tuple[int, int]:
    high, low = (half.to_bytes(8, "little") for half in divmod(number, 2**64))
    return int.from_bytes(high, "little", signed=True), int.from_bytes(low, "little", signed=True)
