"""The digests of a commit, computed beside training: without haste until the next commit comes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from hvdrecover.checkpoint.arena import Arena, Bytes
from hvdrecover.checkpoint.digest import Digest
from hvdrecover.checkpoint.niceness import step_back

_PIECE = 1 << 22  # bytes between two looks at whether there is haste; some 0.2 ms for a thread that is let
_WORTH_A_THREAD = 1 << 26  # bytes
_HEAD_START = 0.005  # seconds for a commit to end; its ranks wait for each other, and the interpreter is one
_PATIENCE = 2.0  # seconds; where all cores are busy, a gigabyte takes about as long without haste


class Digests:
    """The digests of a commit's files, by attribute name.

    A step that computes on all cores takes longer by what digests take of one, 35 to 55 ms/GB. So a thread of
    low priority computes them in what is left over. In haste, or when that takes too long, the calling thread
    continues where that one is.

    Args:
        arenas: by attribute name.
    """

    def __init__(self, arenas: Mapping[str, Arena]) -> None:
        self._nbytes = sum(len(arena.buffer) for arena in arenas.values())
        self._found = {name: Digest() for name in arenas}
        self._left = _pieces(arenas)
        self._haste = threading.Event()
        self._unwanted = False

    def hurry(self) -> None:
        """Let training go first no longer."""
        self._haste.set()

    def cancel(self) -> None:
        """Compute no further: the memory is about to be overwritten."""
        self._unwanted = True

    def compute(self) -> dict[str, str] | None:
        """Return the digests; None if they were cancelled."""
        self._haste.wait(_HEAD_START)
        if self._nbytes >= _WORTH_A_THREAD:
            patient = threading.Thread(target=self._without_haste, name="hvdrecover-near-digest", daemon=True)
            with suppress(RuntimeError):  # no more threads
                patient.start()
                patient.join(_PATIENCE)
                self.hurry()
                patient.join()
        self._take_in(lambda: not self._unwanted)
        return None if self._unwanted else {name: digest.hex() for name, digest in self._found.items()}

    def _without_haste(self) -> None:
        step_back()
        self._take_in(lambda: not (self._unwanted or self._haste.is_set()))

    def _take_in(self, wanted: Callable[[], bool]) -> None:
        while wanted() and (piece := next(self._left, None)) is not None:
            self._found[piece[0]].update(piece[1])


def _pieces(arenas: Mapping[str, Arena]) -> Iterator[tuple[str, Bytes]]:
    for name, arena in arenas.items():
        for start in range(0, len(arena.buffer), _PIECE):
            yield name, arena.buffer[start : start + _PIECE]
