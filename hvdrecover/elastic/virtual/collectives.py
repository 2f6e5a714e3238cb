"""Refusal of collectives in the part of a virtual rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from hvdrecover.elastic.virtual.ranks import are_carried_out
from hvdrecover.errors import StepError

OURS = "hvdrecover"
"""The beginning of the names of our own collectives."""

_COLLECTIVE = re.compile(
    r"horovod_(?:torch_)?((?:grouped_)?(?:allreduce|allgather|broadcast|alltoall|reducescatter)|join|barrier)"
    "(?:_|$)"
)


class Watched:
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
        setattr(self, name, found)
        return found


def refuse(call: str) -> None:
    """Refuse a collective in the part of a virtual rank.

    Args:
        call: its name, as in ``hvd.allreduce``.

    Raises:
        StepError: a virtual rank is being carried out.
    """
    if are_carried_out():
        raise StepError(
            f"hvd.{call}()",
            "called in a step's inner loop, in the part of a virtual rank. Processes carry out different "
            "numbers of parts, so their collectives would not match. Collect values in the inner loop, and "
            "call the collective after the loop. Gradients need no collective: they are averaged "
            "anyway",
        )
