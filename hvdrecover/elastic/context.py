"""The surroundings of one rank's state: what all of its parts are given."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdrecover.clock import Clock
from hvdrecover.config import Config
from hvdrecover.elastic.commits.carried import Carried
from hvdrecover.elastic.commits.contents import Contents
from hvdrecover.elastic.interfaces import Framework, World
from hvdrecover.elastic.ranks import Ranks
from hvdrecover.events import Events


class Place:
    """This rank's place in the job. Until it has agreed on a state with the others, it counts as alone.

    After a rendezvous it is the old one, for which the present state is, until this rank has `arrived`.

    Args:
        world: the processes.
        ranks: which ranks they carry out.

    Attributes:
        job: identity of the job; empty before the first agreement.
    """

    def __init__(self, world: World, ranks: Ranks) -> None:
        self._world = world
        self._ranks = ranks
        self._rank, self._size = 0, 1
        self.job = ""

    @property
    def joined(self) -> bool:
        """Return whether this rank has agreed on a state with the others."""
        return self.job != ""

    @property
    def rank(self) -> int:
        """This rank; 0 while it is alone."""
        return self._rank if self.joined else 0

    @property
    def size(self) -> int:
        """The number of ranks; 1 while this one is alone."""
        return self._size if self.joined else 1

    def arrived(self) -> None:
        """Take the place that the last rendezvous has given to this rank."""
        self._rank, self._size = self._world.rank(), self._world.size()

    @property
    def carried(self) -> Carried:
        """The ranks whose own states this process has: itself, or its virtual ranks."""
        return self._ranks.carried_by(self.rank, self.size)

    @property
    def among_all(self) -> Carried:
        """The same once this rank has agreed with the others."""
        return self._ranks.carried_by(self._world.rank(), self._world.size())

    @property
    def stream(self) -> int:
        """The rank whose random streams this process has; all have one outside of a virtual rank's part."""
        return self._ranks.stream_of(self.rank)


@dataclass(frozen=True)
class Context:
    """The surroundings.

    Attributes:
        framework: the adapter's facts about its framework.
        world: the ranks.
        contents: the state's attributes.
        config: the process's settings.
        events: of this process.
        clock: where times come from.
        place: this rank's place in the job.
        ranks: which ranks a process carries out.
    """

    framework: Framework
    world: World
    contents: Contents
    config: Config
    events: Events
    clock: Clock
    place: Place
    ranks: Ranks

    def announce(self, kind: str, message: str, *, level: int = logging.INFO, **facts: Any) -> None:
        """Emit an event on every rank, with a line on the terminal from rank 0 only."""
        self.events.emit(kind, message if self.world.rank() == 0 else None, level=level, **facts)

    @property
    def attributes(self) -> Mapping[str, Any]:
        """The tracked attributes by name; for adapters, which set none."""
        return self.contents.values
