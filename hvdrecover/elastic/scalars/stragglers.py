"""Stragglers: the ranks that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdrecover.elastic.companions import Moment, Table, Voter

if TYPE_CHECKING:
    from hvdrecover.elastic.scalars.scalars import Scalars


class Stragglers(Voter):
    """Has all ranks learn how long each has worked since the last commit.

    Args:
        scalars: measure that; empty if nobody wants to know, but others may, and all ranks must send as much.
    """

    def __init__(self, scalars: Sequence[Scalars]) -> None:
        self._scalars = scalars

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send the microseconds of this rank's own work; 0 if unknown."""
        if moment.kind == "rendezvous":
            return ()
        return [sum(each.busy() for each in self._scalars) if moment.kind == "commit" else 0]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Pass on what all ranks have sent."""
        if moment.kind != "rendezvous":
            for each in self._scalars:
                each.compare(table[:, 0].tolist())
        return None


def shares(busy: Sequence[int]) -> list[float] | None:
    """Each rank's work as a share of that of the slowest.

    Args:
        busy: how long each rank has worked, in any unit; 0 if unknown.

    Returns:
        By rank, 1.0 for the slowest; None unless all are known.
    """
    return [each / max(busy) for each in busy] if all(each > 0 for each in busy) else None
