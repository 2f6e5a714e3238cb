"""The ranks whose share of the job a process carries out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Carried:
    """Ranks of a job: the process itself, or the virtual ranks that it carries out.

    Attributes:
        ranks: which they are, in order; a spare process carries out none.
        size: of how many.
    """

    ranks: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"rank {', '.join(map(str, self.ranks)) or '-'} of {self.size}"
