"""Gradients that one rank has and another lacks: Horovod sums up zeros in their place without a word."""

from __future__ import annotations

import json
import logging
import zlib
from collections import Counter
from collections.abc import Sequence

from hvdrecover.guard.votes import named
from hvdrecover.state.adapter import gather_json
from hvdrecover.state.hooks import Context, Hook, Moment, Table


class Missing(Hook):
    """The gradients that this rank has lacked since the last commit.

    Attributes:
        steps: by parameter, in how many steps; an adapter counts.

    Args:
        context: the state's surroundings.
    """

    def __init__(self, context: Context) -> None:
        self.steps: Counter[str] = Counter()
        self._context = context
        self._reported: set[str] = set()

    def attach(self) -> None:
        """Have the framework report parameters without a gradient."""
        self._context.framework.report_missing(self._context.contents, self)

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send a digest of the counts; 0 if no gradient was missing."""
        counts = json.dumps(self.steps, sort_keys=True).encode() if self.steps else b""
        return () if moment.kind == "rendezvous" else [zlib.crc32(counts)]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Warn once of each parameter if ranks differ."""
        if moment.kind != "rendezvous" and (table != table[0]).any():
            rows = gather_json(self._context.world, self.steps, "hvdrecover.guard.missing")
            found = {name: _line(name, rows) for name in sorted(set().union(*rows) - self._reported)}
            self._reported.update(found)
            if found:
                lines = list(found.values())
                message = f"no gradient on some ranks, so zeros were summed up for them: {'; '.join(lines)}"
                self._context.announce("missing_gradients", message, level=logging.WARNING, parameters=lines)
        self.steps.clear()  # steps before a recovery are undone
        return None


def _line(name: str, rows: Sequence[dict[str, int]]) -> str:
    ranks = [rank for rank, row in enumerate(rows) if name in row]
    steps = max(row.get(name, 0) for row in rows)
    return f"{name} on {named(ranks)}, in {steps} {'step' if steps == 1 else 'steps'}"
