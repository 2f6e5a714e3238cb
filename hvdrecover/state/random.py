"""The random streams of a job.

With ``"reseed"``, each rank seeds its generators at every commit with numbers derived from the run's seed,
the stream's number and the rank. So a commit stores two numbers, a rank that lost its memory continues with
the very stream it had, and a rank that joins has one of its own. A stream's number rises at every commit,
except one at which nothing has changed since the last: a script that commits before it trains commits once
more when it is resumed, and must continue with the same stream. With ``"store"``, the user's own streams
continue through commits. Each rank's states are part of a commit, and a rank without stored states is seeded
as above.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

Randomness = Literal["reseed", "store"]


def stream(run_seed: int, number: int | str, rank: int) -> Callable[[str], int]:
    """Return a function from a generator's name to its seed after one commit; it can be pickled."""
    return functools.partial(_derive, f"{run_seed}/{number}/{rank}")


def _derive(stream: str, generator: str) -> int:
    digest = hashlib.blake2b(f"{stream}/{generator}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def python_state() -> Any:
    """The state of Python's global generator, its 625 words as an array: JSON takes it at every commit."""
    version, words, gauss = random.getstate()
    return version, np.array(words, dtype=np.uint32), gauss


def set_python(state: Any) -> None:
    """Set Python's global generator to what `python_state` or ``random.getstate()`` gave."""
    version, words, gauss = state
    random.setstate((version, tuple(words.tolist() if isinstance(words, np.ndarray) else words), gauss))


def set_numpy(state: Any) -> None:
    """Set numpy's global generator to what ``numpy.random.get_state(legacy=False)`` gave."""
    # numpy does not check a position beyond the end of its buffer, and the process dies.
    for place, end in ((state["state"].get("pos", 0), 624), (state.get("buffer_pos", 0), 4)):
        if not 0 <= place <= end:
            raise ValueError(f"numpy's generator has no place {place}")
    np.random.set_state(state)
