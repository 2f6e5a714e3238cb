"""Gradients that one rank has and another lacks: zeros are summed up in their place, and nobody notices."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence

from hvdrecover.elastic.guard.votes import named
from hvdrecover.elastic.interfaces import World
from hvdrecover.elastic.recovery import gather_json
from hvdrecover.events import Events


class Missing:
    """What gradients one rank has lacked since the last commit.

    Args:
        world: the ranks.
        events: takes what is found.
    """

    def __init__(self, world: World, events: Events) -> None:
        self._world = world
        self._events = events
        self._told: set[str] = set()
        self._steps: Counter[str] = Counter()
        self.digest = 0
        """Equal on ranks that have lacked the same at the same steps; 0 if nothing."""

    def note(self, step: int, parameters: Sequence[str]) -> None:
        """Parameters of this rank had no gradient at a step."""
        self._steps.update(parameters)
        self.digest = zlib.crc32(repr((step, sorted(parameters))).encode(), self.digest)

    def compare(self, *, alike: bool) -> None:
        """All ranks have told each other their digests; parameters of which that is news are named.

        Args:
            alike: whether the digests were equal.
        """
        if not alike:
            rows = gather_json(self._world, dict(self._steps), "hvdrecover.guard.missing")
            lines = [line for name, line in _lines(rows).items() if name not in self._told]
            self._told.update(*rows)
            if lines:
                self._events.emit(
                    "missing_gradients",
                    f"no gradient on some ranks, so zeros were summed up for them: {'; '.join(lines)}"
                    if self._world.rank() == 0
                    else None,
                    level=logging.WARNING,
                    parameters=lines,
                )
        self._steps.clear()
        self.digest = 0


def _lines(rows: Sequence[dict[str, int]]) -> dict[str, str]:
    """For each parameter, where its gradient was missing, and in how many steps."""
    found = {}
    for name in sorted(set().union(*rows)):
        ranks = [rank for rank, row in enumerate(rows) if name in row]
        steps = max(row.get(name, 0) for row in rows)
        found[name] = f"{name} on {named(ranks)}, in {steps} {'step' if steps == 1 else 'steps'}"
    return found
