"""The policy for numbers that are not finite, as pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdrecover.elastic.guard.settings import Numerics
from hvdrecover.elastic.guard.votes import named

WINDOW = 1000  # steps that a budget is counted in
_LISTED = 8  # tensors or samples in a message; events have all


@dataclass(frozen=True)
class Sighting:
    """The findings of one rank at a step whose gradients are not finite.

    Attributes:
        rank: the rank.
        host: its host.
        tensors: its own that are not finite, such as ``gradient of model.0.weight``; none if they were
            finite before they were summed.
        first: what was not finite before all else, if known, such as ``the output of model.1 (Gate)``.
        epoch: the epoch; -1 if unknown.
        samples: the samples of its batch, as far as they are known.
        used: bad steps within the last `WINDOW` before this one.
    """

    rank: int
    host: str
    tensors: tuple[str, ...]
    first: str = ""
    epoch: int = -1
    samples: tuple[int, ...] = ()
    used: int = 0

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Sighting:
        """Return what another rank has told of by `dataclasses.asdict`."""
        lists = {name: tuple(fields[name]) for name in ("tensors", "samples")}
        return cls(**{**fields, **lists})


class Budget:
    """Remembers the bad steps of one rank."""

    def __init__(self) -> None:
        self._bad: list[int] = []

    def bad(self, step: int) -> None:
        """Note that a step was bad."""
        self._bad.append(step)

    def used(self, step: int) -> int:
        """Return how many of the last `WINDOW` steps before this one were bad."""
        self._bad = [each for each in self._bad if each > step - WINDOW]
        return len(self._bad)


def decide(policy: Numerics, sightings: Sequence[Sighting], budget: int) -> Numerics:
    """Return what to do about a bad step; the same on all ranks, as all have all sightings.

    Args:
        policy: what the user wants.
        sightings: by rank. One that has joined since knows less, so the highest count holds.
        budget: bad steps that may be put up with.
    """
    used = max(sighting.used for sighting in sightings)
    return policy if used < budget else "raise"


def findings(sightings: Sequence[Sighting], everywhere: Sequence[str]) -> list[str]:
    """Lines that say what was not finite, and where.

    Args:
        sightings: by rank.
        everywhere: what is not finite on all ranks, after it was summed.
    """
    lines = []
    for each in sightings:
        if each.tensors:
            samples = f", at samples {_listed(each.samples)} of epoch {each.epoch}" if each.samples else ""
            first = f"first {each.first}; then " if each.first else ""
            lines.append(f"rank {each.rank} on {each.host}{samples}: {first}{_listed(each.tensors)}")
    if not lines:
        ranks = named([each.rank for each in sightings])
        lines.append(f"finite on each of {ranks}, but not their sum: {_listed(everywhere)}")
    return lines


def _listed(items: Sequence[Any]) -> str:
    hidden = len(items) - _LISTED
    return ", ".join([*map(str, items[:_LISTED]), *([f"and {hidden} more"] if hidden > 0 else [])])
