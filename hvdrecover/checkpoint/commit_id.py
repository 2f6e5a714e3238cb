"""The identity and the order of commits."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

_NAME = re.compile(r"g([0-9]{4,9})-c([0-9]{8,18})")


@dataclass(frozen=True, order=True)
class CommitId:
    """A commit's place in the run; later generations come after earlier ones.

    Attributes:
        generation: the number of rendezvous when the commit was made; 0 before the first.
        commit: how many commits had been made since the run began.
    """

    generation: int
    commit: int

    @property
    def name(self) -> str:
        """The commit's folder below the checkpoint root, such as ``g0003-c00000120``."""
        return f"g{self.generation:04d}-c{self.commit:08d}"

    @classmethod
    def parse(cls, name: str) -> CommitId | None:
        """Return the commit whose folder has this name; None if the name is invalid."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        commit = cls(int(match[1]), int(match[2]))
        return commit if commit.name == name else None

    def is_within(self, ranges: Collection[tuple[str, str]]) -> bool:
        """Return whether it lies in one of these ranges, named by their first and their last commit."""
        # Not by name: g10000 sorts before g9999.
        bounds = [(CommitId.parse(first), CommitId.parse(last)) for first, last in ranges]
        return any(first and last and first <= self <= last for first, last in bounds)

    def __str__(self) -> str:
        return self.name
