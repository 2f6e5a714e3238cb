"""This rank's signs of life: its heartbeat, its wait for silent ranks, and the times of its recoveries.

A rank that hangs is killed by its guardian. The others must have left their collectives by then, or they
would be taken for hanging as well. So waiting is limited, except while a rank may be busy for long: before
the job's first commit, in a recovery, and in a pause.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from hvdrecover import heartbeat
from hvdrecover.checkpoint.manifest import Snapshot
from hvdrecover.clock import Clock
from hvdrecover.events import Events
from hvdrecover.state.adapter import World
from hvdrecover.state.hooks import Agreement, Hook, Moment, Table

_world: World | None = None


def follow(world: World | None = None) -> None:
    """Limit waiting as this process's page says."""
    global _world
    _world = world or _world
    if _world is not None and heartbeat.watched():
        _world.allow_stalls(heartbeat.stall_seconds())


@contextmanager
def paused() -> Iterator[None]:
    """Cover a phase that may take long without a sign of progress, such as an evaluation.

    All ranks must enter it, also those that have nothing to do in it: they wait for the others afterwards,
    and that wait does not count as a hang until there is progress again.

    Examples:
        >>> with recover.paused():
        ...     evaluated = sum(range(1000))  # a long evaluation
    """
    with heartbeat.paused():
        follow()
        yield
    heartbeat.at_progress(follow)


class Liveness(Hook):
    """Keeps the heartbeat and the limit of collectives up to date.

    All ranks learn the longest silence of any, so that all judge hangs alike.
    """

    votes_at = ("rendezvous",)

    def __init__(self, world: World) -> None:
        self._world = world

    def captured(self, snapshot: Snapshot) -> None:
        heartbeat.committed(snapshot.id.generation, snapshot.id.commit, snapshot.state["random"]["stream"])

    def committed(self) -> None:
        follow(self._world)

    def agreed(self, agreement: Agreement) -> None:
        commit, changed = agreement.snapshot.id, agreement.snapshot.state["random"]["stream"]
        heartbeat.page.stand_at(commit.generation, commit.commit, changed)
        heartbeat.resume()
        follow(self._world)

    def numbers(self, moment: Moment) -> Sequence[int]:
        return [math.ceil(heartbeat.page.longest * 1000)]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        heartbeat.page.has_seen(int(table.max()) / 1000)
        return None


Part = Literal["reset", "rendezvous", "load", "sync", "first_step"]


class Timings(Hook):
    """Adds up the parts of each recovery; the last part is the first step of training."""

    def __init__(self, clock: Clock, events: Events) -> None:
        self._clock = clock
        self._events = events
        self.parts: defaultdict[Part, float] = defaultdict(float)
        self._agreements = 0

    def agreed(self, agreement: Agreement) -> None:
        self._agreements += 1
        number, ended, commit = self._agreements, self._clock.monotonic(), agreement.snapshot.id

        def first_step() -> None:
            if number != self._agreements:
                return  # there was another rendezvous since then
            self.parts["first_step"] = self._clock.monotonic() - ended
            parts: dict[str, Any] = {name: round(self.parts[name], 6) for name in get_args(Part)}
            seconds = round(sum(parts.values()), 6)
            self.parts.clear()
            self._events.emit("recovered", **vars(commit), **parts, seconds=seconds)

        heartbeat.at_progress(first_step)

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Add the time of the ``with`` block to a part."""
        started = self._clock.monotonic()
        try:
            yield
        finally:
            self.parts[part] += self._clock.monotonic() - started
