"""Refusal of collectives in the part of a virtual rank."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hvdrecover.elastic.virtual.ranks import are_carried_out
from hvdrecover.elastic.watched_library import WatchedLibrary
from hvdrecover.errors import ConfigError, StepError

OURS = "hvdrecover"
"""The beginning of the names of our own collectives."""


class Watched(WatchedLibrary):
    """The watch of virtual ranks, which the end of another watch leaves in place."""


def watch(
    mpi_ops: ModuleType, library: str, look: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Have a framework's collectives watched, once.

    Args:
        mpi_ops: Horovod's module for the framework.
        library: the name of the library in it.
        look: as for `WatchedLibrary`.
    """
    present = getattr(mpi_ops, library)
    if not isinstance(present, Watched):
        setattr(mpi_ops, library, Watched(present, look))


def averages(layer: str, kind: str, instead: str, others: str) -> ConfigError:
    """Return the error for a layer that averages its statistics: a sum has as many parts as processes.

    Args:
        layer: its name in the state.
        kind: its class.
        instead: the class without averages.
        others: a class without statistics of a batch.
    """
    return ConfigError(
        layer,
        f"{kind} averages over processes, so the result would depend on their number. Use {instead}, of "
        "which each virtual rank has its own statistics, or a norm without batch statistics, such as "
        f"{others}",
    )


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
