"""Gradients that one rank has and another lacks: zeros are summed up in their place, and nobody notices."""

from __future__ import annotations

import logging
import zlib
from collections import Counter
from collections.abc import Sequence

from hvdrecover.elastic.agreement.exchange import gather_json
from hvdrecover.elastic.companions import Moment, Table, Voter
from hvdrecover.elastic.context import Context
from hvdrecover.elastic.guard.votes import named


class Missing(Voter):
    """The gradients that one rank has lacked since the last commit.

    Args:
        context: the state's surroundings.
        on: whether the user wants to know.
    """

    def __init__(self, context: Context, *, on: bool) -> None:
        self._context = context
        self._world = context.world
        self._on = on
        self._reported: set[str] = set()
        self._steps: Counter[str] = Counter()
        self.digest = 0
        """Equal on ranks that have lacked the same at the same steps; 0 if nothing."""
        self.period = 0
        """Another number after each commit and rendezvous, from which steps are counted for `note`."""

    def attach(self) -> None:
        """Have the framework report parameters without a gradient."""
        if self._on:
            self._context.framework.report_missing(self._context.contents, self)

    def numbers(self, moment: Moment) -> Sequence[int]:
        """Send the digest."""
        return () if moment.kind == "rendezvous" else [self.digest]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        """Name the parameters if digests differ; it is a warning only."""
        if moment.kind != "rendezvous":
            self._compare(alike=bool((table == table[0]).all()))
        self._steps.clear()  # what came before a recovery is undone
        self.digest = 0
        self.period += 1
        return None

    def note(self, step: int, parameters: Sequence[str]) -> None:
        """Take note of parameters of this rank that had no gradient at a step of this period."""
        self._steps.update(parameters)
        self.digest = zlib.crc32(repr((step, sorted(parameters))).encode(), self.digest)

    def _compare(self, *, alike: bool) -> None:
        """Name parameters of which that is news, now that all ranks have all digests.

        Args:
            alike: whether the digests were equal.
        """
        if not alike:
            rows = gather_json(self._world, dict(self._steps), "hvdrecover.guard.missing")
            lines = [line for name, line in _lines(rows).items() if name not in self._reported]
            self._reported.update(*rows)
            if lines:
                message = f"no gradient on some ranks, so zeros were summed up for them: {'; '.join(lines)}"
                self._context.announce("missing_gradients", message, level=logging.WARNING, parameters=lines)


def _lines(rows: Sequence[dict[str, int]]) -> dict[str, str]:
    """For each parameter, where its gradient was missing, and in how many steps."""
    found = {}
    for name in sorted(set().union(*rows)):
        ranks = [rank for rank, row in enumerate(rows) if name in row]
        steps = max(row.get(name, 0) for row in rows)
        found[name] = f"{name} on {named(ranks)}, in {steps} {'step' if steps == 1 else 'steps'}"
    return found
