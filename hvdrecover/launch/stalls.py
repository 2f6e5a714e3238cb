"""Collectives that wait for ranks, in one message: which tensors, for whom, and where these ranks are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_LISTED = 3  # tensors


@dataclass
class Stall:
    """A rank's report of a stall, and what is learnt of the ranks that are waited for.

    Attributes:
        missing: the tensors that wait for each rank.
        seconds: how long there has been no progress.
        places: where these ranks are, in words; None of one that has said to be at something long.
    """

    missing: Mapping[int, Sequence[str]]
    seconds: float
    places: dict[int, str | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Return whether all ranks have answered."""
        return self.places.keys() >= self.missing.keys()

    def message(self) -> str:
        """The message; empty if all that are waited for have said to be at something long."""
        return "; ".join(
            f"{_listed(names)} waited {self.seconds:.0f} s for {self.places.get(rank) or f'rank {rank}'}"
            for rank, names in sorted(self.missing.items())
            if self.places.get(rank, "") is not None
        )


def _listed(names: Sequence[str]) -> str:
    shown, hidden = ", ".join(names[:_LISTED]), len(names) - _LISTED
    if hidden > 0:
        return f"{shown} and {hidden} more have"
    return f"{shown} {'has' if len(names) == 1 else 'have'}"
