"""Which rank the others wait for."""

from __future__ import annotations

from collections.abc import Sequence


def shares(busy: Sequence[int]) -> list[float] | None:
    """Each rank's work as a share of that of the slowest.

    Args:
        busy: how long each rank has worked, in any unit; 0 if unknown.

    Returns:
        By rank, 1.0 for the slowest; None unless all are known.
    """
    return [each / max(busy) for each in busy] if all(each > 0 for each in busy) else None
