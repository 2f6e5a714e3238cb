"""A world of which one rank is real: what it does with the words of all is measured, sending them is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.state.horovod import HorovodWorld, framed

_WORD = 8  # bytes of the length before what a rank sends

Alike = Callable[[bytes, int], bytes]
"""Returns what another rank sends where this one sends some bytes."""


class Simulated(HorovodWorld):
    """Rank 0 of many, which all say what it says.

    Args:
        ranks: how many.
        alike: makes what others gather of what this one does; None has them send the very same.

    Attributes:
        seconds: the time that was spent on making the others' words up, which counts for nobody.
    """

    def __init__(self, ranks: int, alike: Alike | None = None) -> None:
        super().__init__(None)
        self._ranks = ranks
        self._alike = alike or (lambda mine, rank: mine)
        self.seconds = 0.0

    def rank(self) -> int:
        """This one."""
        return 0

    def size(self) -> int:
        """Number of ranks, all but one of them simulated."""
        return self._ranks

    def allow_stalls(self, seconds: int) -> None:
        """Nobody is waited for."""

    def lost(self, error: BaseException) -> bool:
        """Never."""
        return False

    def join(self, mine: npt.NDArray[np.int64], name: str) -> npt.NDArray[np.int64]:
        """All ranks' arrays, as Horovod would hand them over."""
        began = time.perf_counter()
        if mine.ndim == 2:
            joined = np.tile(mine, (self._ranks, 1))
        else:
            words = mine.tobytes()
            sent = words[_WORD : _WORD + int.from_bytes(words[:_WORD], "little")]
            rows = [framed(self._alike(sent, rank)) for rank in range(self._ranks)]
            joined = np.frombuffer(b"".join(rows), dtype="<i8")
        self.seconds += time.perf_counter() - began
        return joined

    def broadcast(self, buffer: Bytes, root: int, name: str) -> None:
        """Rank 0 sends, and has it already."""
