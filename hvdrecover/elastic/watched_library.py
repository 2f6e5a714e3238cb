"""A watch on the collectives of Horovod's native libraries."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_COLLECTIVE = re.compile(
    r"horovod_(?:torch_)?((?:grouped_)?(?:allreduce|allgather|broadcast|alltoall|reducescatter)|join|barrier)"
    "(?:_|$)"
)


class WatchedLibrary:
    """Horovod's native library, with `look` applied to each of its collectives.

    Scripts, layers and Horovod's own Python code all call collectives through this library.

    Args:
        library: the library.
        look: takes the name by which scripts call a collective, and the library's function. Returns the
            function to call instead.
    """

    def __init__(self, library: Any, look: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._library = library
        self._look = look

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        if match := _COLLECTIVE.match(name):
            found = self._look(match[1], found)
        setattr(self, name, found)  # a script may call it at every step
        return found
